"""What of a run is compiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from stillroom.config import Config
from stillroom.models import LoadedModel
from stillroom.models.compiled import CompiledBody, what_to_compile
from stillroom.precision import Precision


def compile_bodies(
    config: Config,
    student: LoadedModel,
    teacher: LoadedModel | None,
    precision: Precision,
    num_tokens: int,
    tell: Callable[[str], object],
) -> tuple[CompiledBody | None, CompiledBody | None]:
    """The compiled bodies of student and teacher, None where one runs as it is. Nothing is compiled yet."""
    flops = 6.0 * student.anatomy.num_parameters * num_tokens
    chosen = what_to_compile(config.train.compile, precision.device.type, flops)
    if chosen == "off":
        return None, None
    if precision.emulates_half:
        if config.train.compile != "auto":
            tell("compile: off, because FP16 products are emulated on a CPU")
        return None, None
    _keep_compiled_code()
    bodies = []
    for role, loaded in (("student", student), ("teacher", teacher if chosen == "both" else None)):
        if loaded is not None and not loaded.is_described:
            tell(f"compile: the {role} answers with its own logits and is not compiled")
            loaded = None
        bodies.append(None if loaded is None else CompiledBody(loaded.network, role, tell))
    return bodies[0], bodies[1]


def tokens_of_run(num_steps: int, rows_per_step: int, max_length: int) -> int:
    """An upper bound, by counts alone."""
    return num_steps * rows_per_step * max_length


def _keep_compiled_code() -> None:
    """Between runs, so that the second one does not compile again. A folder that the user set stays."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(base / "stillroom" / f"inductor-{torch.__version__}")
