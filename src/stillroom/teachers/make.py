"""Make the teacher of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stillroom.config import Config
from stillroom.config.teacher import TRAINING_MODES, TeacherConfig
from stillroom.data.spans.common import Coverage
from stillroom.errors import ConfigError
from stillroom.models import LoadedModel, open_teacher
from stillroom.models.compiled import CompiledBody
from stillroom.models.routers import find_gates
from stillroom.teachers.base import NO_TEACHER, Teacher
from stillroom.teachers.coarse import Coarse
from stillroom.teachers.elsewhere import RemoteModel, RemoteTeacher
from stillroom.teachers.live import LiveTeacher
from stillroom.teachers.paired import PairedTeacher
from stillroom.teachers.placement import Placement, StreamedModel, open_streamed
from stillroom.teachers.router.in_run import RunRouter, Surroundings
from stillroom.teachers.router.paired import PairedRouter
from stillroom.teachers.router.teacher import RouterTeacher
from stillroom.teachers.signals import SignalSpec
from stillroom.teachers.sparse import SparseTeacher
from stillroom.teachers.spec import check_use, live_spec, served_spec


def make_teacher(
    config: Config,
    loaded: LoadedModel | None,
    vocab_size: int,
    surroundings: Surroundings,
    *,
    num_processes: int = 1,
    compiled: CompiledBody | None = None,
    shared: str = "",
    coarse: Callable[[SignalSpec, int], Coarse | None] = lambda _spec, _size: None,
    placement: Placement | None = None,
) -> Teacher:
    """`NO_TEACHER` where none was loaded, a `LiveTeacher` for router mode `frozen`, else a `RunRouter`.

    `shared` and `coarse` are the tokens that both models have, where each has a tokenizer of its own. `placement` is
    where the weights were put already.
    """
    if loaded is None:
        return NO_TEACHER
    if isinstance(loaded, RemoteModel):
        return RemoteTeacher(loaded, vocab_size=vocab_size, device=surroundings.precision.device)
    if config.teacher.router.mode == "frozen":
        spec = live_spec(config, shared)
        device = surroundings.precision.device
        if spec is None:
            return live_teacher(config, loaded, vocab_size, device, compiled, placement)
        live, notes = live_teacher(config, loaded, vocab_size, device), check_use(config, spec)
        return SparseTeacher(live, spec, notes=notes, coarse=coarse(spec, vocab_size))
    if num_processes > 1 and config.teacher.router.mode == "sar-meta":
        raise ConfigError(
            f"teacher.router.mode = 'sar-meta' moves the student by hand in one process, and there are {num_processes}",
            where="teacher.router.mode",
            advice=["--set teacher.router.mode=sar", "start a single process"],
        )
    return RunRouter(config, loaded, vocab_size, surroundings)


def paired_teacher(inner: Teacher, tokenizer: Any, coverage: Coverage | None) -> PairedTeacher:
    """A teacher that reads its own tokens around one that reads rows."""
    found = coverage or Coverage()
    if isinstance(inner, RouterTeacher):
        return PairedRouter(inner, tokenizer, found)
    return PairedTeacher(inner, tokenizer, found)


def open_live(section: TeacherConfig, dtype: torch.dtype, tokenizer: Any = None) -> LoadedModel:
    """Load a teacher as its placement wants it, and test it."""
    if section.placement == "stream":
        return open_streamed(section, dtype, tokenizer)
    return open_teacher(section, dtype, tokenizer)


def live_teacher(
    config: Config,
    loaded: LoadedModel,
    vocab_size: int,
    device: torch.device,
    compiled: Any = None,
    placement: Placement | None = None,
) -> LiveTeacher:
    if placement is None and isinstance(loaded, StreamedModel) and loaded.stream is not None:
        loaded.stream.settle(device)
        placement = loaded.stream
    return LiveTeacher(
        loaded.network,
        vocab_size=vocab_size,
        device=device,
        offload=config.teacher.placement == "offload",
        is_described=loaded.is_described,
        compiled=compiled,
        facts=loaded.facts,
        placement=placement,
    )


def check_teacher_settings(config: Config) -> None:
    """Raise for settings that cannot work together."""
    if config.teacher.server and not config.teacher.cache:
        served_spec(config)
    if config.teacher.router.mode == "sar-joint" and config.objectives.kd.top_k:
        raise ConfigError(
            "sar-joint sends the student's gradient into the teacher, which needs its whole distribution",
            where="objectives.kd.top_k",
            advice=["--set objectives.kd.top_k=0", "--set teacher.router.mode=sar"],
        )


def num_trained_by_teacher(config: Config, model: Any) -> int:
    """The number of gate weights that are trained; it counts when a precision is chosen."""
    router = config.teacher.router
    if model is None or router.mode not in TRAINING_MODES:
        return 0
    own = dict(model.named_parameters())
    names = [name for gate in find_gates(model, router.patterns) for name in gate.parameter_names()]
    return sum(int(own[name].numel()) for name in names)
