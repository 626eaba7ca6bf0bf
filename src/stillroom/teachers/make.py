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
from stillroom.teachers.base import NO_TEACHER, RunContext, Teacher
from stillroom.teachers.coarse import Coarse
from stillroom.teachers.live import LiveTeacher
from stillroom.teachers.paired import PairedTeacher
from stillroom.teachers.placement import Placement
from stillroom.teachers.router.gates import GateOptions
from stillroom.teachers.router.paired import PairedRouterTraining
from stillroom.teachers.router.teacher import RouterTeacher, RouterTraining
from stillroom.teachers.signals import SignalSpec
from stillroom.teachers.sparse import SparseTeacher
from stillroom.teachers.spec import check_use, live_spec, served_spec
from stillroom.teachers.streamed import StreamedModel, open_streamed


def make_teacher(
    config: Config,
    loaded: LoadedModel | None,
    vocab_size: int,
    run: RunContext,
    *,
    is_paired: bool = False,
    compiled: CompiledBody | None = None,
    shared: str = "",
    coarse: Callable[[SignalSpec, int], Coarse | None] = lambda _spec, _size: None,
    placement: Placement | None = None,
) -> Teacher:
    """`NO_TEACHER` where none was loaded, a `LiveTeacher` for router mode `frozen`, else a `RouterTeacher`.

    `shared` and `coarse` are the tokens that both models have, where each has a tokenizer of its own. `placement` is
    where the weights were put already.
    """
    if loaded is None:
        return NO_TEACHER
    if config.teacher.router.mode == "frozen":
        spec = live_spec(config, shared)
        device = run.precision.device
        if spec is None:
            return live_teacher(config, loaded, vocab_size, device, compiled, placement)
        live, notes = live_teacher(config, loaded, vocab_size, device), check_use(config, spec)
        return SparseTeacher(live, spec, notes=notes, coarse=coarse(spec, vocab_size))
    num_processes = run.parallel.size
    if num_processes > 1 and config.teacher.router.mode == "sar-meta":
        raise ConfigError(
            f"teacher.router.mode = 'sar-meta' moves the student by hand in one process, and there are {num_processes}",
            where="teacher.router.mode",
            advice=["--set teacher.router.mode=sar", "start a single process"],
        )
    train = config.train
    router = RouterTeacher(
        loaded.network,
        config.teacher.router,
        vocab_size=vocab_size,
        device=run.precision.device,
        options=GateOptions(
            learning_rate=train.router_learning_rate or train.learning_rate,
            max_grad_norm=train.max_grad_norm,
            betas=(train.beta1, train.beta2),
            epsilon=train.epsilon,
        ),
        offload=config.teacher.placement == "offload",
        is_described=loaded.is_described,
        seed=train.seed,
        tell=run.tell,
        parallel=run.parallel,
    )
    router.training = (PairedRouterTraining if is_paired else RouterTraining)(router, run)
    return router


def paired_teacher(inner: Teacher, tokenizer: Any, coverage: Coverage | None) -> PairedTeacher:
    """A teacher that reads its own tokens around one that reads rows."""
    training = inner.training if isinstance(inner, RouterTeacher) else None
    return PairedTeacher(inner, tokenizer, coverage or Coverage(), training)


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
