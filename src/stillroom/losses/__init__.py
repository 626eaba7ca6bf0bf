"""The objectives of a run. `fused_head_loss` and the divergences can be used without the rest of the library."""

from stillroom.config.schema import Recipe
from stillroom.losses import hidden as hidden  # registers its objectives
from stillroom.losses import two_tokenizers as two_tokenizers  # registers its objective
from stillroom.losses.head.loss import DenseTeacher, HeadLoss, SampledTeacher, TopKTeacher, fused_head_loss, score_head
from stillroom.losses.mix import Mix, ModelDims, Objective, Plan, plan_objectives, register

__all__ = [
    "DenseTeacher",
    "HeadLoss",
    "Mix",
    "ModelDims",
    "Objective",
    "Plan",
    "Recipe",
    "SampledTeacher",
    "TopKTeacher",
    "fused_head_loss",
    "plan_objectives",
    "register",
    "score_head",
]
