"""Every divergence, with settings that show it at work."""

from __future__ import annotations

import pytest
from torch import Tensor

from stillroom.losses import divergences


def value_of(
    name: str, student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0, **over: float
) -> Tensor:
    """The divergence of that name for each row of logits."""
    return divergences.on_logits(divergences.make(name, over), student_logits, teacher_logits, temperature)


MEMBERS = [
    divergences.make("forward_kl"),
    divergences.make("reverse_kl"),
    divergences.make("jsd", {"beta": 0.5}),
    divergences.make("jsd", {"beta": 0.1}),
    divergences.make("jsd", {"beta": 0.9}),
    divergences.make("skew_forward_kl", {"alpha": 0.1}),
    divergences.make("skew_reverse_kl", {"alpha": 0.3}),
    divergences.make("total_variation"),
    divergences.make("alpha_beta", {"alpha": 0.2, "beta": 0.7}),
    divergences.make("alpha_beta", {"alpha": 0.9, "beta": 0.3}),
    divergences.make("taid", {"interpolation": 0.4}),
    divergences.make("todi"),
    divergences.make("akl"),
]
every_member = pytest.mark.parametrize("member", MEMBERS, ids=repr)
# The adaptive ones hold what they decide fixed, which finite differences cannot: they are compared with autograd of the
# textbook, where it is detached.
ADAPTIVE = divergences.Interpolated, divergences.TokenWise, divergences.HeadAndTail
SMOOTH = [member for member in MEMBERS if not isinstance(member, ADAPTIVE)]
every_smooth_member = pytest.mark.parametrize("member", SMOOTH, ids=repr)
