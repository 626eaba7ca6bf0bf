"""Divergences between a teacher and a student, with closed-form slopes."""

from stillroom.objectives.divergences import adaptive as adaptive  # registers its members
from stillroom.objectives.divergences.base import Divergence
from stillroom.objectives.divergences.family import (
    STEEP,
    AlphaBeta,
    ForwardKL,
    JensenShannon,
    ReverseKL,
    SkewForwardKL,
    SkewReverseKL,
    TotalVariation,
)
from stillroom.objectives.divergences.functions import (
    forward_kl,
    jsd,
    reverse_kl,
    skew_forward_kl,
    skew_reverse_kl,
    total_variation,
)
from stillroom.objectives.divergences.named import Member, make, names, register, settings_of
from stillroom.objectives.divergences.on_logits import on_logits, softmax_pullback, student_gradient

__all__ = [
    "STEEP",
    "AlphaBeta",
    "Divergence",
    "ForwardKL",
    "JensenShannon",
    "Member",
    "ReverseKL",
    "SkewForwardKL",
    "SkewReverseKL",
    "TotalVariation",
    "forward_kl",
    "jsd",
    "make",
    "names",
    "on_logits",
    "register",
    "reverse_kl",
    "settings_of",
    "skew_forward_kl",
    "skew_reverse_kl",
    "softmax_pullback",
    "student_gradient",
    "total_variation",
]
