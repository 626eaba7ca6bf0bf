"""Stillroom distils a large language model into a small one and survives faults on the way.

import stillroom
result = stillroom.distill(teacher="org/large", student="org/small", data="texts.jsonl", out="runs/mine")
model, tokenizer = result.load_student()

Names are loaded when they are first used: `import stillroom` loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stillroom.config import Config, load_config
from stillroom.errors import StillroomError

if TYPE_CHECKING:
    from stillroom.api.calls import distill, evaluate, generate, resume
    from stillroom.assess import Assessment, Scores
    from stillroom.engine.ending.result import Result
    from stillroom.objectives import DenseTeacher, SampledTeacher, TopKTeacher, fused_head_loss
    from stillroom.objectives.divergences import make as make_divergence
    from stillroom.objectives.divergences import names as divergence_names
    from stillroom.objectives.divergences import register as register_divergence

__version__ = "0.1.0"
__all__ = [
    "Assessment",
    "Config",
    "DenseTeacher",
    "Result",
    "SampledTeacher",
    "Scores",
    "StillroomError",
    "TopKTeacher",
    "distill",
    "divergence_names",
    "evaluate",
    "fused_head_loss",
    "generate",
    "load_config",
    "make_divergence",
    "register_divergence",
    "resume",
]

# Module and attribute of each name that is loaded on first use.
_LATE = {
    "Assessment": ("stillroom.assess", "Assessment"),
    "DenseTeacher": ("stillroom.objectives", "DenseTeacher"),
    "Result": ("stillroom.engine.ending.result", "Result"),
    "SampledTeacher": ("stillroom.objectives", "SampledTeacher"),
    "Scores": ("stillroom.assess", "Scores"),
    "TopKTeacher": ("stillroom.objectives", "TopKTeacher"),
    "distill": ("stillroom.api.calls", "distill"),
    "divergence_names": ("stillroom.objectives.divergences", "names"),
    "evaluate": ("stillroom.api.calls", "evaluate"),
    "fused_head_loss": ("stillroom.objectives", "fused_head_loss"),
    "generate": ("stillroom.api.calls", "generate"),
    "make_divergence": ("stillroom.objectives.divergences", "make"),
    "register_divergence": ("stillroom.objectives.divergences", "register"),
    "resume": ("stillroom.api.calls", "resume"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'stillroom' has no attribute {name!r}")
    module, attribute = _LATE[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
