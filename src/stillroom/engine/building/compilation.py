"""What of a run is compiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stillroom.config import Config
from stillroom.engine.building.models import Models
from stillroom.models.anatomy import layers_if_any
from stillroom.models.compiled import CompiledBody, what_to_compile
from stillroom.models.compiled_layers import CompiledLayers
from stillroom.precision import Precision
from stillroom.telemetry import EventLog


def compile_bodies(
    config: Config, models: Models, precision: Precision, num_windows: int, log: EventLog, *, is_sharded: bool = False
) -> tuple[CompiledBody | None, CompiledBody | None]:
    """The compiled bodies of student and teacher, None where one runs as it is. Nothing is compiled yet.

    `num_windows` are those of all processes together. A sharded student is compiled layer by layer.
    """

    def tell(text: str) -> None:
        log.write("note", text=text)

    rows = config.train.rows_per_batch * config.train.gradient_accumulation_steps
    num_tokens = num_windows * rows * config.data.max_length  # an upper bound, by counts alone
    flops = 6.0 * models.loaded_student.anatomy.num_parameters * num_tokens
    chosen = what_to_compile(config.train.compile, precision.device.type, flops)
    if chosen == "off":
        return None, None
    if precision.emulates_half:
        if config.train.compile != "auto":
            tell("compile: off, because FP16 products are emulated on a CPU")
        return None, None
    _keep_compiled_code()
    bodies = []
    teacher = models.loaded_teacher if chosen == "both" else None
    section = config.teacher
    is_plain = section.placement == "device" and section.router.mode == "frozen" and section.quantisation == "none"
    if teacher is not None and not is_plain:
        kinds = "offloaded, streamed, sharded, quantised or whose gates are changed"
        tell(f"compile: a teacher that is {kinds} runs as it is")
        teacher = None
    for role, loaded in (("student", models.loaded_student), ("teacher", teacher)):
        if loaded is not None and not loaded.is_described:
            tell(f"compile: the {role} answers with its own logits and is not compiled")
            loaded = None
        bodies.append(None if loaded is None else _body(loaded.network, role, tell, is_sharded and role == "student"))
    return bodies[0], bodies[1]


def _body(network: Any, role: str, tell: Callable[[str], object], is_sharded: bool) -> CompiledBody:
    if is_sharded and (layers := layers_if_any(network)):
        return CompiledLayers(network, layers, role, tell)
    return CompiledBody(network, role, tell)


def _keep_compiled_code() -> None:
    """Between runs, so that the second one does not compile again. A folder that the user set stays."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(base / "stillroom" / f"inductor-{torch.__version__}")
