"""What the student is asked to do. `fused_head_loss` and the divergences are usable without the rest."""

from stillroom.objectives import adaptive as adaptive  # registers its members by name
from stillroom.objectives.head import (
    DenseTeacher,
    HeadLoss,
    SampledTeacher,
    TopKTeacher,
    fused_head_loss,
    score_head,
)
from stillroom.objectives.mix import Mix

__all__ = [
    "DenseTeacher",
    "HeadLoss",
    "Mix",
    "SampledTeacher",
    "TopKTeacher",
    "fused_head_loss",
    "score_head",
]
