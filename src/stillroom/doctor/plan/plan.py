"""Plan a run: count its bytes in every precision, find changes that make it fit, and say what it costs."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from stillroom.config import Config
from stillroom.config.load import build, put
from stillroom.config.schema import STRATEGIES
from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.core.machine import main_memory
from stillroom.data import open_data
from stillroom.doctor.plan.cost import Cost, cost_of
from stillroom.doctor.printed import plan_lines
from stillroom.models import find, has_tokenizer, load_tokenizer
from stillroom.parallel import Parallel
from stillroom.parallel.fsdp import check_shard_size
from stillroom.precision.device import DeviceFacts, find_device
from stillroom.precision.gpus import Gpu
from stillroom.precision.policy import POLICIES
from stillroom.teachers.several import live_models
from stillroom.telemetry import EventLog
from stillroom.training.build import build_run, make_loader
from stillroom.training.cut_rounds import is_one_run, sized
from stillroom.training.memory import (
    AIM,
    COPY,
    Layout,
    Shapes,
    Sharing,
    Target,
    chosen_mode,
    free_here,
    lay_out,
    micro_of,
    uses_teacher,
)
from stillroom.training.models import load_models
from stillroom.training.rollouts import seconds_of_answer
from stillroom.training.run import RunState
from stillroom.training.schedule import windows_in
from stillroom.training.step import train_step
from stillroom.training.trace import Sizes

_SHORTEST = 64  # positions of a row that still hold a sentence or two
_RANK = 16


# ---- The device that a run is planned for

_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str, where: str = "--device-memory") -> int:
    """Read 16GB, 15.9 GiB or 500MB: GB are powers of ten, GiB of two.

    A number without a unit is refused: it could mean GB or bytes.
    """
    amount = _AMOUNT.fullmatch(text)
    if amount is not None and not amount[2]:
        unit_meant = "GB" if float(amount[1]) < _UNITS["mb"] else "B"
        raise ConfigError(f"{text!r} has no unit", where=where, advice=[f"{where} {text.strip()}{unit_meant}"])
    unit = _UNITS.get(amount[2].lower()) if amount else None
    if amount is None or unit is None or int(float(amount[1]) * unit) < 1:
        raise ConfigError(
            f"{text!r} is not a memory size",
            where=where,
            advice=[f"{where} 16GB, {where} 15.9GiB, {where} 800MB"],
        )
    return int(float(amount[1]) * unit)


def find_target(device: str = "auto", device_memory: int | None = None, gpu: Gpu | None = None) -> Target:
    """A named GPU, a GPU of so many bytes where this machine has none, or this machine's device."""
    main = main_memory().available
    if gpu is not None:
        return Target(torch.device("cuda"), gpu.facts, device_memory or gpu.memory_bytes, main)
    if device == "auto" and device_memory is not None and not torch.cuda.is_available():
        facts = DeviceFacts("cuda", "a GPU", True, device_memory)
        note = "planned for a GPU with native bf16; --gpu T4 plans for one that has none, --device cpu for this CPU"
        return Target(torch.device("cuda"), facts, device_memory, main, notes=(note,))
    here = free_here(find_device(device))
    return replace(here, bound=device_memory or here.bound)


def with_processes(target: Target, num_processes: int, strategy: str = "auto", shard_size: int = 0) -> Target:
    """The same device for one of several processes, each with its own device. `shard_size` belongs to fsdp."""
    if strategy not in STRATEGIES:
        raise ConfigError(f"unknown strategy {strategy!r}", where="--strategy", advice=[" or ".join(STRATEGIES)])
    if strategy != "fsdp" or num_processes == 1:
        return replace(target, sharing=Sharing(num_processes))
    check_shard_size(shard_size, num_processes, strategy)
    return replace(target, sharing=Sharing(num_processes, True, shard_size))


# ---- The plan


_IN_ROUNDS = "student.shrink.rounds: memory and time are those of the first round for all steps; later ones take less"


@dataclass(frozen=True)
class Plan:
    target: Target
    mode: str
    reason: str
    layout: Layout
    totals: dict[str, int]  # by precision
    activations: dict[str, int]  # kept for the backward pass, by how
    attention: dict[str, int]  # what both kernels keep
    fitted: Fitted
    cost: Cost
    free_disk: int  # here, in the present folder
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.layout.total <= self.target.bound

    @property
    def is_possible(self) -> bool:
        return self.fitted.layout.total <= self.target.bound

    def __str__(self) -> str:
        return "\n".join(plan_lines(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        after = self.fitted.layout
        return {
            "device": self.target.facts.name,
            "processes": self.target.sharing.num_processes,
            "strategy": self.target.sharing.strategy,
            "bound": self.target.bound,
            "precision": self.mode,
            "reason": self.reason,
            "plan": self.layout.to_dict(),
            "totals": self.totals,
            "activations": self.activations,
            "attention": self.attention,
            "fits": self.fits,
            "is_possible": self.is_possible,
            "short_by": max(0, after.total - self.target.bound),
            "disk_free": self.free_disk,
            "disk_short_by": max(0, sum(self.layout.disk.values()) - self.free_disk),
            "changes": [one.to_dict() for one in self.fitted.applied],
            "settings": self.fitted.settings,
            "fitted": after.to_dict(),
            "cost": self.cost.to_dict(),
            "notes": list(self.notes),
        }


def make_plan(
    config: Config,
    target: Target,
    *,
    gpu: Gpu | None = None,
    is_quick: bool = False,
    probes: bool = False,
    tell: Callable[[str], None] = lambda _text: None,
) -> Plan:
    """`gpu`: model the time by its published figures. `is_quick`: do not count the data. `probes`: load the models and
    time one real step on this machine."""
    in_rounds = not is_one_run(config)
    if in_rounds:
        config = config.model_copy(update={"student": sized(config, 1)})
    shapes = Shapes(target)
    tell("the models as shapes")
    mode, reason = chosen_mode(config, shapes)
    counted = None
    if not is_quick:
        tell("the data")
        counted = count_data(config)
    num_tokens = counted[1] if counted else None
    layout = lay_out(config, shapes, mode, num_tokens=num_tokens)
    tell("every precision")
    totals = {name: lay_out(config, shapes, name).total for name in _possible(config, target)}
    fitted = fit(config, shapes, target.bound)
    measured = answer = None
    if probes:
        tell("one real step")
        measured, answer = timed_step(config, target.device)
    cost = cost_of(
        config, layout, teacher=_teacher(config, shapes, layout), counted=counted[:2] if counted else None,
        gpu=gpu, measured=measured, measured_answer=answer,
    )  # fmt: skip
    kept, attention = _alternatives(config, shapes, mode, layout.rows)
    return Plan(
        target, mode, reason, layout, totals, kept, attention, fitted, cost, shutil.disk_usage(Path.cwd()).free,
        (
            *target.notes, *shapes.notes, *target.sharing.notes, *([_IN_ROUNDS] if in_rounds else []),
            *_of_teachers(config), *_left_out(config),
        ),
    )  # fmt: skip


def _possible(config: Config, target: Target) -> list[str]:
    """Precisions that the device has, and the configuration allows."""
    has_bf16 = target.facts.has_native_bf16 or not target.is_gpu
    base = config.student.adapter.base_dtype if config.student.adapter is not None else "auto"
    is_half_possible = base in ("auto", "float16")
    return [
        mode
        for mode, policy in POLICIES.items()
        if (mode != "bf16-mixed" or has_bf16)
        and (is_half_possible or not policy.keeps_half_weights)
        and not (target.sharing.is_sharded and mode in ("fp16-split", "fp16-sr"))
    ]


def _teacher(config: Config, shapes: Shapes, layout: Layout) -> Sizes | None:
    """The teacher's sizes for the cost, also where a cache answers for it. None where nothing asks it."""
    if layout.teacher is not None or not uses_teacher(config):
        return layout.teacher
    live = config.model_copy(update={"teacher": config.teacher.model_copy(update={"cache": None})})
    return lay_out(live, shapes, layout.mode).teacher


def _alternatives(config: Config, shapes: Shapes, mode: str, rows: int) -> tuple[dict[str, int], dict[str, int]]:
    """What is kept for the backward pass with and without checkpointing, and by either kind of attention."""

    def kept(**how: bool) -> int:
        _sizes, trace = shapes.student(config, micro_of(config, mode, rows=rows, **how), None)
        return trace.kept - trace.casts

    plain, fused, opened = kept(recomputes=False), kept(), kept(is_open=True)
    activations = {"kept": plain, "checkpointed": kept(recomputes=True)}
    return activations, {"fused kernel": fused, "open, all probabilities kept": opened}


def _of_teachers(config: Config) -> list[str]:
    """What to know of a teacher that is the student, and of those of single sources."""
    if not uses_teacher(config):
        return []
    notes = {
        "self": ["the teacher is the student without its adapter: no second copy of its weights is in memory"],
        "ema": ["the teacher is an average of the trained weights, in FP32: four bytes for each, and in checkpoints"],
    }.get(config.teacher.model, [])
    live = live_models(config)
    stored = [name for name in config.data.source_teachers if name not in live]
    if live:
        notes.append(f"counted with the teacher: the models of {', '.join(live)}")
    if stored:
        notes.append(f"answered by their own caches: {', '.join(stored)}")
    return notes


def _left_out(config: Config) -> list[str]:
    notes = ["not counted in the table: fragmentation, compiled bodies"]
    if inner := config.objectives.inner_weights:
        notes.append(f"not counted: hidden states and maps that {' and '.join(inner)} keep, and their projectors")
    if config.data.teacher_prefix:
        notes.append("not counted: the teacher's rows are longer by data.teacher_prefix")
    if config.teacher.placement == "shard":
        notes.append("not counted: a teacher without safetensors files is loaded into main memory first")
    if config.teacher.router.mode != "frozen":
        notes.append(
            f"not counted: the backward pass of the teacher's gates, teacher.router.mode = {config.teacher.router.mode}"
        )
    return notes


# ---- Changes that make a run fit, the least harmful first, each tried on shapes before it is proposed


@dataclass(frozen=True)
class Change:
    settings: Mapping[str, Any]
    what: str
    cost: str


@dataclass(frozen=True)
class Applied:
    change: Change
    saved: int
    left: int  # the total after it

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": dict(self.change.settings),
            "what": self.change.what,
            "saves": self.saved,
            "costs": self.change.cost,
            "total_after": self.left,
        }


@dataclass(frozen=True)
class Fitted:
    config: Config
    layout: Layout
    applied: tuple[Applied, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Dotted keys that differ from what was asked for."""
        return {key: value for one in self.applied for key, value in one.change.settings.items()}


def fit(config: Config, shapes: Shapes, bound: int) -> Fitted:
    """Apply changes until the run takes no more than `bound`, or none is left. One that saves nothing is not kept.

    Predictions are off by a few per cent. So changes that cost time alone are made until a twentieth of the bound is
    left; one that changes what is learned is made only where the run would not fit without it.
    """
    now = lay_out(config, shapes, chosen_mode(config, shapes)[0])
    if now.total <= bound:
        return Fitted(config, now, ())
    applied: list[Applied] = []
    for propose in _IN_ORDER_OF_HARM:
        while now.total > (AIM * bound if propose in _TIME_ALONE else bound):
            change = propose(config, now, shapes)
            tried = _try(config, change, shapes) if change else None
            if change is None or tried is None or tried[1].total >= now.total:
                break
            applied.append(Applied(change, now.total - tried[1].total, tried[1].total))
            config, now = tried
    return Fitted(config, now, tuple(applied))


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """The configuration with other values of dotted keys; raises as one that a user wrote would."""
    table = config.to_dict()
    for key, value in settings.items():
        put(table, key, value)
    return build(table, "the fitted configuration")


def _try(config: Config, change: Change, shapes: Shapes) -> tuple[Config, Layout] | None:
    """None where the configuration does not allow it."""
    try:
        new = changed(config, change.settings)
        return new, lay_out(new, shapes, chosen_mode(new, shapes)[0])
    except ConfigError:
        return None


def _awaited_saves(_config: Config, now: Layout, _shapes: Shapes) -> Change | None:
    if not now.on_cpu or COPY not in now.host:
        return None
    cost = "nothing learned changes; training waits while a checkpoint is written"
    return Change({"checkpoint.background": "off"}, "checkpoints without a copy of the state", cost)


def _smaller_batch(config: Config, _now: Layout, _shapes: Shapes) -> Change | None:
    """The next smaller divisor, so that a step has the same rows."""
    if config.train.batch_size == "auto":
        return None  # chosen by the same model already
    rows, parts = config.train.rows_per_batch, config.train.gradient_accumulation_steps
    smaller = next((size for size in range(rows // 2, 0, -1) if rows % size == 0), None)
    if smaller is None:
        return None
    settings = {"train.batch_size": smaller, "train.gradient_accumulation_steps": parts * rows // smaller}
    return Change(settings, f"micro-batches of {smaller}", "nothing learned changes; small products are slower")


def _recompute(config: Config, _now: Layout, _shapes: Shapes) -> Change | None:
    if config.student.gradient_checkpointing:
        return None
    cost = "a second forward pass of the student: a third more of its time"
    return Change({"student.gradient_checkpointing": True}, "activations computed again in the backward pass", cost)


def _cache(config: Config, _now: Layout, shapes: Shapes) -> Change | None:
    if config.teacher.cache or config.teacher.server or config.teacher.is_student or not uses_teacher(config):
        return None
    cost = "the teacher reads the data once before the run, disk, and only its top tokens are kept"
    return Change({"teacher.cache": "auto"}, "the teacher's answers stored before the run", cost)


def _offload(config: Config, now: Layout, shapes: Shapes) -> Change | None:
    is_here = now.teacher is not None and config.teacher.placement == "device" and not config.teacher.is_student
    if not is_here or not shapes.target.is_gpu or config.teacher.quantisation != "none":
        return None
    return Change({"teacher.placement": "offload"}, "the teacher in main memory between its answers",
                  "its weights are copied to the GPU for each micro-batch")  # fmt: skip


def _stream(config: Config, now: Layout, _shapes: Shapes) -> Change | None:
    is_plain = config.teacher.placement != "stream" and config.teacher.quantisation == "none"
    if now.teacher is None or not is_plain or config.teacher.is_student:
        return None
    return Change({"teacher.placement": "stream"}, "two layers of the teacher at a time",
                  "its files are read for each micro-batch")  # fmt: skip


def _moments(config: Config, _now: Layout, shapes: Shapes) -> Change | None:
    """The next smaller storage."""
    smaller = {
        "float32": ("bfloat16", "moments have 8 bits of precision, rounded stochastically"),
        "bfloat16": ("int8", "moments are codes of 8 bits, rounded stochastically"),
    }
    is_cut = config.precision.moments == "bfloat16" and shapes.target.sharing.is_sharded
    if config.precision.moments not in smaller or is_cut:
        return None
    name, cost = smaller[config.precision.moments]
    return Change({"precision.moments": name}, f"moments in {name}", cost)


def _split(config: Config, now: Layout, _shapes: Shapes) -> Change | None:
    if now.mode in ("fp16-split", "fp16-sr") or config.student.adapter is not None:
        return None
    cost = "FP16 range with a scaled loss; weights have 22 bits"
    return Change({"precision.mode": "fp16-split"}, "FP16 weights with FP16 residuals", cost)


def _adapter(config: Config, _now: Layout, _shapes: Shapes) -> Change | None:
    student = config.student
    if student.adapter is not None or student.init not in ("auto", "pretrained") or find_spec("peft") is None:
        return None
    if not find(student.model).has_weights:  # a base that is drawn at random and stays so learns nothing
        return None
    return Change({"student.adapter": {"rank": _RANK}}, f"an adapter of rank {_RANK} is trained alone",
                  "the student's own weights stay as they are: it learns less")  # fmt: skip


def _shorter(config: Config, _now: Layout, _shapes: Shapes) -> Change | None:
    length = config.data.max_length // 2
    if length < _SHORTEST:
        return None
    return Change({"data.max_length": length}, f"rows of {length}",
                  "longer texts are cut: nothing is learned of what lies further back")  # fmt: skip


_IN_ORDER_OF_HARM: tuple[Callable[[Config, Layout, Shapes], Change | None], ...] = (
    _awaited_saves, _smaller_batch, _recompute, _cache, _offload, _stream, _moments, _split, _adapter, _shorter,
)  # fmt: skip
_TIME_ALONE = (_awaited_saves, _smaller_batch, _recompute)


# ---- What is counted or measured instead of computed


def count_data(config: Config) -> tuple[int, int]:
    """Steps and tokens of one pass over the training data, opened as a run opens it."""
    has_own = not config.student.reads_as_teacher and has_tokenizer(config.student, config.student.model)
    section = config.student if has_own else config.teacher
    tokenizer = load_tokenizer(section, section.model)
    corpus = open_data(config.data, tokenizer)
    loader = make_loader(config, corpus, Parallel())
    steps = windows_in(loader.num_batches, config.train.gradient_accumulation_steps)
    rows = loader.num_batches * config.train.rows_per_batch
    return steps, rows * config.data.max_length


def timed_step(config: Config, device: torch.device) -> tuple[float, float | None]:
    """Seconds of the second step of a run that is built, and thrown away. The first one warms up.

    And those of one answer of a round, of the longest kind, where the student writes any.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BrokenAtStart(
            "a step can only be measured on a device that is here", where="--probe", advice=["--probe --device cpu"]
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir()
        with EventLog(folder / "events.jsonl") as log:
            models = load_models(config, device, folder=folder)
            run = build_run(config, folder, log, device=device, models=models)
            run.student.train()
            state = RunState(applied=1)  # the first step is sampled for the log
            seconds = 0.0
            for _ in range(2):
                began = time.perf_counter()
                train_step(run, state, run.loader.first_window())
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds = time.perf_counter() - began
            return seconds, seconds_of_answer(run)
