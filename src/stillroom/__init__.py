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
from stillroom.core.errors import StillroomError
from stillroom.core.quiet import quiet_imports

if TYPE_CHECKING:
    from stillroom.api import (
        Training,
        distill,
        evaluate,
        examine,
        export_student,
        generate,
        plan,
        preview,
        push,
        resume,
        training,
        write_cache,
    )
    from stillroom.losses.divergences import make as make_divergence
    from stillroom.losses.divergences import names as divergence_names
    from stillroom.losses.divergences import register as register_divergence
    from stillroom.losses.head.loss import DenseTeacher, SampledTeacher, TopKTeacher, fused_head_loss
    from stillroom.metrics.evaluate import Assessment, Scores
    from stillroom.training.distill import Step
    from stillroom.training.finish import Result

__version__ = "0.1.0"
__all__ = [
    "Assessment",
    "Config",
    "DenseTeacher",
    "Result",
    "SampledTeacher",
    "Scores",
    "Step",
    "StillroomError",
    "TopKTeacher",
    "Training",
    "distill",
    "divergence_names",
    "evaluate",
    "examine",
    "export_student",
    "fused_head_loss",
    "generate",
    "load_config",
    "make_divergence",
    "plan",
    "preview",
    "push",
    "register_divergence",
    "resume",
    "training",
    "write_cache",
]

quiet_imports()

# Module and attribute of each name that is loaded on first use.
_LATE = {
    "Assessment": ("stillroom.metrics.evaluate", "Assessment"),
    "DenseTeacher": ("stillroom.losses", "DenseTeacher"),
    "Result": ("stillroom.training.finish", "Result"),
    "SampledTeacher": ("stillroom.losses", "SampledTeacher"),
    "Scores": ("stillroom.metrics.evaluate", "Scores"),
    "Step": ("stillroom.training.distill", "Step"),
    "TopKTeacher": ("stillroom.losses", "TopKTeacher"),
    "Training": ("stillroom.api", "Training"),
    "distill": ("stillroom.api", "distill"),
    "divergence_names": ("stillroom.losses.divergences", "names"),
    "evaluate": ("stillroom.api", "evaluate"),
    "examine": ("stillroom.api", "examine"),
    "export_student": ("stillroom.api", "export_student"),
    "fused_head_loss": ("stillroom.losses", "fused_head_loss"),
    "generate": ("stillroom.api", "generate"),
    "make_divergence": ("stillroom.losses.divergences", "make"),
    "plan": ("stillroom.api", "plan"),
    "preview": ("stillroom.api", "preview"),
    "push": ("stillroom.api", "push"),
    "register_divergence": ("stillroom.losses.divergences", "register"),
    "resume": ("stillroom.api", "resume"),
    "write_cache": ("stillroom.api", "write_cache"),
}


def __getattr__(name: str) -> Any:
    if name == "training":  # a package that can be called, see its docstring
        return importlib.import_module("stillroom.training")
    if name not in _LATE:
        raise AttributeError(f"module 'stillroom' has no attribute {name!r}")
    module, attribute = _LATE[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE, "training"})
