"""The objectives of a run. `fused_head_loss` and the divergences can be used without the rest of the library."""

from stillroom.objectives.crosstok import prefix_groups as prefix_groups  # registers its objective
from stillroom.objectives.crosstok import span_terms as span_terms  # registers its objectives
from stillroom.objectives.head import (
    DenseTeacher,
    HeadLoss,
    SampledTeacher,
    TopKTeacher,
    fused_head_loss,
    score_head,
)
from stillroom.objectives.inner import terms as terms  # registers its objectives
from stillroom.objectives.mix import Mix
from stillroom.objectives.objective import Inside, Objective, Plan, Recipe, plan_objectives, register

__all__ = [
    "DenseTeacher",
    "HeadLoss",
    "Inside",
    "Mix",
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
