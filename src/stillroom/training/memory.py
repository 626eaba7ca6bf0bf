"""The model of memory: the bytes of a run by part, on the device, in main memory and on disk.

`lay_out` is the one answer to "does it fit". `stillroom plan` prints it and searches with it, `batch_size = "auto"`
and the handler of memory that ran out choose micro-batches by it, `doctor` compares it with the machine.

On the device three moments of a step may be the largest: the teacher answers, the student's forward and backward, the
update. Each is a sum of parts, and the layout is the largest of them. Bytes of a parameter are from
`precision/policy.py`, bytes of a micro-batch from `training/trace.py`.
"""

from __future__ import annotations

import ctypes
import gc
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch

from stillroom.config import Config
from stillroom.core.errors import OutOfMemory, StillroomError
from stillroom.core.files import reason_of
from stillroom.core.machine import main_memory
from stillroom.core.shortages import is_out_of_memory
from stillroom.core.types import Batch, Detail
from stillroom.losses.head.products import POOL
from stillroom.losses.head.rows import forget_free_memory
from stillroom.models import Student
from stillroom.parallel import Parallel
from stillroom.precision import AdamW, BytesPerParameter, bytes_per_parameter
from stillroom.precision.adamw import MUON_SCRATCH
from stillroom.precision.device import DeviceFacts, facts_of, teacher_dtype
from stillroom.precision.policy import choose, needs_fp32_weights
from stillroom.precision.storage import Split, Stochastic
from stillroom.teachers.placement import pinned_bytes
from stillroom.teachers.several import for_source, live_models
from stillroom.teachers.signals import cache_spec
from stillroom.telemetry import EventLog
from stillroom.training.checkpoint import (
    CheckpointSnapshots,
    CheckpointStore,
    DiskCopies,
    Saves,
    SnapshotRing,
    Snapshots,
)
from stillroom.training.cpu_rates import Shape, answers_in_bf16, with_rates
from stillroom.training.evaluate import Evaluation, evaluate, never_stop
from stillroom.training.run import Run, RunState
from stillroom.training.schedule import Curriculum
from stillroom.training.trace import CASTS, DATA, GRADIENTS, HEAD, Micro, Sizes, StudentTrace, TeacherTrace, Traces

AIM = 0.95  # share of a bound that is planned for: predictions are off by a few per cent
ROWS_ON_CPU = 8  # larger micro-batches are no faster there
SHARE_OF_MAIN_MEMORY = 0.4  # of what is free: snapshots, the best student and a copy to save may take it
CONTEXT = 500_000_000  # of CUDA and the workspaces of its libraries: an allowance, it was not measured here
LARGE_COPY = 256_000_000  # bytes of a copy of the state
# Of a process that trains, next to its tensors: torch and transformers 470 MB, the rest is tokenizer, data and what the
# allocator keeps. Measured with a student of 81M parameters and a vocabulary of 49,152.
LIBRARIES = 650_000_000
LEARNS = "student learns"  # the moment of a step in which layers are gathered
COPY = "copy to save"  # of the state, in main memory
_UPDATE_SCRATCH = 1 << 27  # the optimizer takes tensors in buckets of so much scratch; a larger one is alone in its own
# FP32 copies of both moments 8, random bits 8, and what rounding one of them takes 9: they are rounded one by one.
_MOMENTS_SCRATCH = {"float32": 0, "bfloat16": 25, "int8": 40}
_NAMES = {CASTS: "autocast casts", DATA: "batch", HEAD: "head gradients and scratch"}
_STATE = ("student weights", "masters", "residuals", "moments", GRADIENTS)
_WRITER_LOGITS = 5  # [rows, vocabulary] at once: logits, log-probs, probabilities, sums, the chosen token alone
_WEIGHT, _HALF = 4, 2  # bytes: what is sharded is FP32, masters are gathered in FP16


# ---- Where a run is


@dataclass(frozen=True)
class Sharing:
    """How many processes there are, and whether each holds a part of the student."""

    num_processes: int = 1
    is_sharded: bool = False
    shard_size: int = 0  # processes that hold one copy of a sharded student; 0: all

    @property
    def num_parts(self) -> int:
        return self.shard_size or self.num_processes

    @property
    def strategy(self) -> str:
        return "single" if self.num_processes == 1 else "fsdp" if self.is_sharded else "ddp"

    @property
    def notes(self) -> tuple[str, ...]:
        if self.num_processes == 1:
            return ()
        text = f"bytes are those of one of {self.num_processes} processes with {self.strategy}; disk is that of all"
        copies = f"; groups of {self.num_parts} hold a copy each"
        first = "; the first one also reads the whole student back at the end, to write samples"
        return (text + copies * (self.num_parts < self.num_processes) + first * self.is_sharded,)

    def moment(self, name: str, parts: Mapping[str, int], sizes: Sizes, *, accumulates: bool) -> dict[str, int]:
        """The parts of a moment of a step in one process.

        DDP keeps buckets as large as the gradient all the time, and the gradients of the last micro-batch are views of
        them. FSDP2 holds the root (embeddings, last norm, head) whole from the first forward of a step to its last
        backward, and two layers: one at work, and one on its way.
        """
        if self.num_processes == 1:
            return dict(parts)
        if not self.is_sharded:
            own = {part: held for part, held in parts.items() if part != GRADIENTS or accumulates}
            return {**own, "gradient buckets": _WEIGHT * sizes.num_trained}
        shared = {part: self._part(held) if part in _STATE else held for part, held in parts.items()}
        if "masters" in parts:  # the parts are the masters, and FP16 weights are there while they are gathered
            part_of_each = self._part(_WEIGHT * sizes.num_trained)
            shared |= {"student weights": 0, "masters": part_of_each}
            shared |= {GRADIENTS: part_of_each} if GRADIENTS in parts else {}
        if name != LEARNS:
            return shared
        return shared | (_gathered_under_adapter(sizes) if sizes.frozen_bytes else _gathered(parts, sizes))

    def kept(self, parts: Mapping[str, int]) -> dict[str, int]:
        """Snapshots, the best student and copies in main memory, in one process."""
        if not self.is_sharded:
            return dict(parts)
        return {part: held if part == "teacher" else self._part(held) for part, held in parts.items()}

    def _part(self, held: int) -> int:
        return -(-held // self.num_parts)


def _gathered(parts: Mapping[str, int], sizes: Sizes) -> dict[str, int]:
    """The root and two layers; gradients of the root and one layer."""
    each = _HALF if "masters" in parts else _WEIGHT
    layers = [held * each // sizes.itemsize for held in sizes.layer_bytes]
    root, largest = each * sizes.num_trained - sum(layers), max(layers, default=0)
    return {"gathered weights": root + 2 * largest, "gathered gradients": root + largest}


def _gathered_under_adapter(sizes: Sizes) -> dict[str, int]:
    """The same with a frozen base, in the bytes it is stored in; it has no gradients."""
    largest = max(sizes.layer_bytes, default=0)
    root = sizes.frozen_bytes + _WEIGHT * sizes.num_trained - sum(sizes.layer_bytes)
    gradients = -(-_WEIGHT * sizes.num_trained // max(len(sizes.layer_bytes), 1))
    return {"gathered weights": root + 2 * largest, "gathered gradients": gradients}


@dataclass(frozen=True)
class Target:
    """The device of a process, and what it may take there."""

    device: torch.device
    facts: DeviceFacts
    bound: int  # bytes that a run may take on the device
    main_memory: int  # free on this machine
    sharing: Sharing = field(default_factory=Sharing)
    notes: tuple[str, ...] = ()

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


def free_here(device: torch.device) -> Target:
    """A device of this machine, with what is free now."""
    main = main_memory().available
    free = int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else main
    return Target(device, facts_of(device), free, main)


def held_here(device: torch.device, sharing: Sharing) -> Target:
    """The same for a run that this process already began: what it holds is its to use.

    On a CPU the memory of the process has the libraries in it, about half a GB that no tensor can take.
    """
    main = main_memory().available
    if device.type == "cuda":
        bound = int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device) + CONTEXT
    else:
        bound = main + int(psutil.Process().memory_info().rss)
    return Target(device, facts_of(device), bound, main, sharing)


class Shapes(Traces):
    """The traced models of one target."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.device, target.facts, target.bound)
        self.target = target


# ---- The bytes of a run


@dataclass(frozen=True)
class Layout:
    """The bytes of a configuration in one precision."""

    mode: str
    rows: int  # of a micro-batch
    moment: str  # of the step that is the largest
    device: Mapping[str, int]  # by part at that moment
    moments: Mapping[str, int]  # the sum at each moment
    host: Mapping[str, int]
    disk: Mapping[str, int]
    on_cpu: bool
    sizes: Sizes
    teacher: Sizes | None
    trace: StudentTrace

    @property
    def total(self) -> int:
        """On the device. On a CPU that is main memory, where snapshots and the best student are too."""
        return sum(self.device.values()) + (sum(self.host.values()) if self.on_cpu else 0)

    @property
    def process(self) -> int:
        """What the system will say that the process takes at its peak; on a GPU that is not known."""
        return self.total + LIBRARIES if self.on_cpu else 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "total": self.total,
            "process": self.process,
            "largest_at": self.moment,
            "moments": dict(self.moments),
            "device": dict(self.device),
            "main_memory": dict(self.host),
            "disk": dict(self.disk),
        }


def uses_teacher(config: Config) -> bool:
    return Curriculum.of(config).uses_teacher


def chosen_mode(config: Config, shapes: Shapes) -> tuple[str, str]:
    """The precision that the run will have, and why."""
    sizes, _ = shapes.student(config, micro_of(config, "fp32"), None)
    asked, facts, is_wide = config.precision, shapes.target.facts, needs_fp32_weights(config)
    if asked.mode == "auto":
        num_processes = shapes.target.sharing.num_processes
        facts = with_rates(facts, _shape(config, sizes), sizes.num_trained, num_processes=num_processes)
    by_muon = _by_muon(config, sizes)
    return choose(asked.mode, facts, sizes.num_trained, moments=asked.moments, num_by_muon=by_muon, is_wide=is_wide)


def _shape(config: Config, sizes: Sizes) -> Shape:
    """The products of a student without its weights. The matrices of its body are taken to be D by 4 D."""
    tokens, head = config.train.rows_per_batch * config.data.max_length, sizes.vocabulary * sizes.width
    body = max(1, sizes.num_trained - head)
    return Shape(tokens, 4 * sizes.width, sizes.width, sizes.vocabulary, sizes.width, body)


def micro_of(
    config: Config, mode: str, *, rows: int = 0, recomputes: bool | None = None, is_open: bool = False
) -> Micro:
    """`rows` other than those of a batch: it is taken in parts."""
    train = config.train
    rows = rows or train.rows_per_batch
    return Micro(
        mode=mode,
        rows=rows,
        length=config.data.max_length,
        accumulates=train.gradient_accumulation_steps > 1 or rows < train.rows_per_batch,
        recomputes=config.student.gradient_checkpointing if recomputes is None else recomputes,
        is_open=is_open,
    )


def parts_that_fit(config: Config, shapes: Shapes, mode: str, *, least: int = 1) -> int:
    """Into how many micro-batches a batch is cut so that one fits: `least`, doubled until it does or has one row."""
    rows, parts, bound = config.train.rows_per_batch, least, AIM * shapes.target.bound
    while parts < rows and lay_out(config, shapes, mode, rows=math.ceil(rows / parts)).total > bound:
        parts *= 2
    return parts


def auto_parts(config: Config, shapes: Shapes, mode: str) -> int:
    """What `batch_size = "auto"` cuts the rows of a step into."""
    on_cpu = not shapes.target.is_gpu
    return parts_that_fit(config, shapes, mode, least=math.ceil(config.train.step_rows / ROWS_ON_CPU) if on_cpu else 1)


def lay_out(config: Config, shapes: Shapes, mode: str, *, rows: int = 0, num_tokens: int | None = None) -> Layout:
    """Count the bytes of a run. `rows` of a micro-batch: those of the configuration, where none are given."""
    target = shapes.target
    if not rows and config.train.batch_size == "auto":
        rows = math.ceil(config.train.step_rows / auto_parts(config, shapes, mode))
    asks = uses_teacher(config)
    is_live = asks and not config.teacher.cache and not config.teacher.server
    is_there = is_live or (asks and config.teacher.cache == "auto" and not config.teacher.server)
    dtype = teacher_dtype(config.teacher.dtype, target.facts)
    trained = shapes.student(config, micro_of(config, "fp32"), None)[0].num_trained
    if answers_in_bf16(config, mode, target.device.type, trained):
        dtype = torch.bfloat16
    micro = micro_of(config, mode, rows=rows)
    teacher = work = None
    if is_there:
        asked = _with_student_as_teacher(config) if config.teacher.is_student else config
        teacher, work = shapes.teacher(asked, micro.rows, micro.length, dtype)
    sizes, trace = shapes.student(config, micro, (teacher, dtype) if is_live and teacher is not None else None)
    state = _state(config, mode, sizes)
    if target.is_gpu:
        state["CUDA context"] = CONTEXT
    if trace.head_kept:
        state["head scratch"] = trace.head_kept
    stays, visits, at_home = _teacher_bytes(config, teacher, work, target)
    if config.teacher.is_student:  # no copy of its weights but the average
        stays = average_bytes(config) * sizes.num_trained
    for spec in live_models(config).values() if asks else ():
        own = for_source(config, spec)
        stays += shapes.teacher(own, micro.rows, micro.length, dtype)[1].weights
    held = bytes_per_parameter(_state_mode(config, mode), accumulates=micro.accumulates)
    gradients = sizes.num_trained * held.gradients
    answer = work.answer if work is not None and is_live else _sparse_bytes(config, micro) if asks else 0

    moments: dict[str, dict[str, int]] = {}
    if work is not None:
        name = "teacher answers" if is_live else "cache is written"
        earlier = {GRADIENTS: gradients} if micro.accumulates and is_live else {}
        moments[name] = {"teacher": stays + visits, "teacher at work": work.work, **state, **earlier}
        stays = stays if is_live else 0
    resident = {"teacher": stays} if stays else {}
    at_peak = {_NAMES.get(part, part): held for part, held in trace.at_peak.items()}
    both = {part: state.get(part, 0) + at_peak.get(part, 0) for part in {**state, **at_peak}}
    moments[LEARNS] = {**resident, "teacher's answer": answer, **both}
    if config.rollouts is not None:
        moments["rounds are written"] = {**resident, **state, **_writing_bytes(config, mode, sizes)}
    scratch = _update_scratch(config, mode, sizes, accumulates=micro.accumulates)
    moments["update"] = {**resident, **state, GRADIENTS: gradients, "update scratch": scratch}
    share = target.sharing
    moments = {name: share.moment(name, one, sizes, accumulates=micro.accumulates) for name, one in moments.items()}
    largest = max(moments, key=lambda name: sum(moments[name].values()))
    return Layout(
        mode=mode,
        rows=micro.rows,
        moment=largest,
        device={part: size for part, size in moments[largest].items() if size},
        moments={name: sum(parts.values()) for name, parts in moments.items()},
        host=share.kept(_host(config, mode, sizes, at_home, target)),
        disk=_disk(config, mode, sizes, num_tokens, is_gpu=target.is_gpu),
        on_cpu=not target.is_gpu,
        sizes=sizes,
        teacher=teacher,
        trace=trace,
    )


def _state(config: Config, mode: str, sizes: Sizes) -> dict[str, int]:
    """What the student takes between steps. Vectors have FP32 masters in every FP16 mode, an adapter is FP32."""
    held = bytes_per_parameter(_state_mode(config, mode))
    master = bytes_per_parameter("fp16-master").extra
    is_half = held.weights == 2
    extra = sum(count * (master if is_half and axes < 2 else held.extra) for count, axes in sizes.trained)
    parts = {"student weights": sizes.num_trained * held.weights + sizes.frozen_bytes}
    if extra:
        parts["residuals" if mode == "fp16-split" else "masters"] = extra
    parts["moments"] = sum(one.moments * count for one, count, _ in _held(config, mode, sizes))
    return parts


def _held(config: Config, mode: str, sizes: Sizes) -> list[tuple[BytesPerParameter, int, bool]]:
    """Bytes of the student's parameters with two moments and of those with Muon's one, as `copies_of` takes them."""
    own, moments, by_muon = _state_mode(config, mode), config.precision.moments, _by_muon(config, sizes)
    one = bytes_per_parameter(own, moments, num_moments=1)
    return [(bytes_per_parameter(own, moments), sizes.num_trained - by_muon, True), (one, by_muon, True)]


def _by_muon(config: Config, sizes: Sizes) -> int:
    return sizes.hidden if config.train.optimizer == "muon" else 0


def _state_mode(config: Config, mode: str) -> str:
    """An adapter is trained in FP32 in every mode; weights rounded to blocks have FP32 masters."""
    blocks = "+blocks" if config.student.quantise else ""
    return "fp32" if config.student.adapter is not None else mode + blocks


def _writing_bytes(config: Config, mode: str, sizes: Sizes) -> dict[str, int]:
    """What writing a piece of a round takes: keys and values of every layer, and FP32 logits with their sums.

    At most: fewer key heads than query heads, sliding windows and recurrent layers keep less.
    """
    assert config.rollouts is not None
    rows, itemsize = config.rollouts.batch_size, 4 if mode == "fp32" else 2
    cache = 2 * sizes.layers * sizes.width * itemsize * rows * config.data.max_length
    return {"KV cache": cache, "logits of the writer": _WRITER_LOGITS * 4 * rows * sizes.vocabulary}


def _update_scratch(config: Config, mode: str, sizes: Sizes, *, accumulates: bool) -> int:
    """FP32 copies that an update takes: of a bucket, or of the largest tensor where that is more."""
    own = _state_mode(config, mode).partition("+")[0]
    is_half = own.startswith("fp16-") and own != "fp16-mixed" and not accumulates
    storage = {"fp16-split": Split.scratch_bytes, "fp16-sr": Stochastic.scratch_bytes}.get(own, 4 * is_half)
    each = storage + _MOMENTS_SCRATCH[config.precision.moments] + MUON_SCRATCH * (config.train.optimizer == "muon")
    largest = each * max((count for count, _axes in sizes.trained), default=0)
    return max(largest, min(each * sizes.num_trained, _UPDATE_SCRATCH))


def _teacher_bytes(
    config: Config, teacher: Sizes | None, trace: TeacherTrace | None, target: Target
) -> tuple[int, int, int]:
    """Bytes that stay on the device, that come while it answers, and that are in main memory for a GPU."""
    if teacher is None or trace is None:
        return 0, 0, 0
    if config.teacher.quantisation != "none":
        return trace.weights, 0, 0
    whole = trace.weights
    outside, two_layers = whole - sum(teacher.layer_bytes), sum(sorted(teacher.layer_bytes)[-2:])
    if config.teacher.placement == "stream" and teacher.layer_bytes:
        # Layers that are read ahead for a GPU are pinned, each in blocks of a power of two.
        ahead = 2 * pinned_bytes([max(teacher.layer_bytes)]) if target.is_gpu else 0
        return outside, two_layers, ahead
    if config.teacher.placement == "shard" and target.sharing.num_processes > 1:
        # What is outside of layers is gathered from the first answer of a window to its end.
        return -(-whole // target.sharing.num_parts) + outside, two_layers, 0
    if config.teacher.placement == "offload" and target.is_gpu:
        head = teacher.vocabulary * teacher.width * teacher.itemsize
        return head, whole - head, pinned_bytes(teacher.tensor_bytes)
    return whole, 0, 0


def _with_student_as_teacher(config: Config) -> Config:
    """The configuration with the student's model as a teacher that is loaded: it has the same shapes."""
    student = config.student
    named = {"model": student.model, "revision": student.revision, "trust_remote_code": student.trust_remote_code}
    return config.model_copy(update={"teacher": config.teacher.model_copy(update=named)})


def average_bytes(config: Config) -> int:
    """Bytes a trained parameter of the student's average; 0 where none is kept."""
    return 4 if config.teacher.model == "ema" and uses_teacher(config) else 0


def _sparse_bytes(config: Config, micro: Micro) -> int:
    """A stored answer in memory: ids of eight bytes and probabilities of four."""
    spec = cache_spec(config)
    return micro.rows * micro.length * (12 * spec.width + 4 * spec.is_paired)


# ---- Main memory and disk


@dataclass(frozen=True)
class Copies:
    """Bytes of copies of the state in main memory."""

    snapshots: int  # the ring, and the initial state where the guard may begin again
    best: int  # the best student
    to_save: int  # one that is written in the background

    @property
    def kept(self) -> int:
        return self.snapshots + self.best

    def go_to_disk(self, *, is_gpu: bool) -> bool:
        """Whether all copies are files: where the models share main memory with them, and one of them is large."""
        return not is_gpu and self.to_save > LARGE_COPY

    def leave_room(self, free: int, *, num_copies: int = 1) -> bool:
        """Whether snapshots are a modest share of the free memory, kept by so many processes of a machine."""
        return self.kept * num_copies <= SHARE_OF_MAIN_MEMORY * free

    def with_saves_leave_room(self, free: int, *, num_copies: int = 1, num_savers: int = 1) -> bool:
        return self.to_save * num_savers + self.kept * num_copies <= SHARE_OF_MAIN_MEMORY * free


def copies_of(config: Config, trained: Iterable[tuple[BytesPerParameter, int, bool]]) -> Copies:
    """`trained`: bytes of a parameter, number of parameters, and whether they are part of the student.

    Frozen weights are in no copy, projectors not in that of the best student.
    """
    trained = list(trained)
    one = sum((held.snapshot + average_bytes(config) * is_student) * count for held, count, is_student in trained)
    best = sum(held.best * count for held, count, is_student in trained if is_student)
    num_snapshots = config.guard.snapshot_ring + (config.guard.on_exhausted == "reset")
    return Copies(num_snapshots * one, best, one)


def _host(config: Config, mode: str, sizes: Sizes, at_home: int, target: Target) -> dict[str, int]:
    """Main memory. Snapshots that are large on a CPU, or would take more than a share of it, are not kept there."""
    free = target.main_memory
    copies = copies_of(config, _held(config, mode, sizes))
    asked = config.checkpoint.background
    on_disk = copies.go_to_disk(is_gpu=target.is_gpu)
    saves_beside = asked == "on" or (asked == "auto" and copies.with_saves_leave_room(free) and not on_disk)
    parts = {
        "snapshots": copies.snapshots if copies.leave_room(free) and not on_disk else 0,
        "best student": 0 if on_disk else copies.best,
        COPY: copies.to_save if saves_beside else 0,
        "teacher": at_home,
    }
    return {part: size for part, size in parts.items() if size}


def _disk(config: Config, mode: str, sizes: Sizes, num_tokens: int | None, *, is_gpu: bool) -> dict[str, int]:
    copies = copies_of(config, _held(config, mode, sizes))
    one = copies.to_save + copies.best
    parts = {
        "checkpoints": one * (config.checkpoint.keep + 1),  # one is written before one is deleted
        "student": 4 * sizes.num_trained + sizes.frozen_bytes,
    }
    if copies.go_to_disk(is_gpu=is_gpu):
        parts["snapshots"] = copies.kept
    if num_tokens and config.teacher.cache:
        parts["teacher's cache"] = int(num_tokens * cache_bytes(config))
    return parts


def cache_bytes(config: Config) -> float:
    """Bytes a position of a cache: straight lines through the sizes that docs/guides/cache.md measured. An estimate."""
    spec = cache_spec(config)
    targets = 4.0 if spec.is_paired else 0.0  # one FP32 a position, before it is packed
    if spec.kind == "target":
        return targets
    if spec.draws and spec.exact:
        return targets + 25.3 + 2.8 * spec.exact + 0.4 * (spec.draws - 12)
    return targets + (0.9 * spec.draws if spec.draws else 10.0 + 2.35 * spec.exact)


# -- fitting ---------------------------------------------------------------------------------------
# Fit the work of a run into memory: choose micro-batches that fit, and cut them smaller where memory runs out.
#
# How many fit is asked of the model of memory (`training/memory.py`), and a trial or the next attempt has the last
# word. Terms are sums and the counts of the whole window divide once, so a window in smaller parts gives the same
# loss and the same gradient, up to the order of FP32 sums. The size that fits is kept for the rest of the run, in its
# checkpoints too.


T = TypeVar("T")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parts_of(batches: Iterable[Batch], state: RunState) -> Iterator[Batch]:
    """The micro-batches at the size that fits."""
    for batch in batches:
        yield from batch.parts(state.micro_batch_parts)


def micro_batch_rows(run: Run, state: RunState) -> int:
    """Rows in the largest micro-batch."""
    return math.ceil(run.config.train.rows_per_batch / state.micro_batch_parts)


# ---- Where `train.batch_size = "auto"`


def find_micro_batch(run: Run, state: RunState) -> None:
    """Take the rows of a step in the largest micro-batches that fit. Weights and random state stay as they are."""
    if run.config.train.batch_size != "auto":
        return
    on_cpu = run.device.type == "cpu"
    mode, otherwise = run.precision.mode, math.ceil(run.config.train.step_rows / ROWS_ON_CPU) if on_cpu else 1
    state.micro_batch_parts = _predicted(run, lambda shapes: auto_parts(run.config, shapes, mode), otherwise)
    if not on_cpu:  # main memory cannot be tried without swapping
        with run.stages.stage("finding the largest micro-batch that fits"):
            within_memory(run, state, lambda: _try(run, state))
    rows, shortages = micro_batch_rows(run, state), state.shortages
    state.shortages = 0  # a trial is no fault
    why = f"larger than {ROWS_ON_CPU} are no faster on a CPU" if on_cpu else f"found in {shortages + 1} trials"
    run.log.write("note", text=Detail(f"micro-batches of {rows:,} rows, {why}"))


def _predicted(run: Run, ask: Callable[[Shapes], int], otherwise: int) -> int:
    """Ask the model of memory for a number of parts; all processes take the largest."""
    parallel = run.parallel
    shard_size = run.config.train.shard_size if parallel.is_sharded else 0
    sharing = Sharing(parallel.size, parallel.is_sharded, shard_size)
    try:
        parts = ask(Shapes(held_here(run.device, sharing)))
    except StillroomError as error:  # a configuration that is not on this machine, or a family without shapes
        run.log.write("note", text=f"how much memory a micro-batch takes is not known: {error}")
        parts = otherwise
    return int(parallel.worst(float(parts)))


def _try(run: Run, state: RunState) -> None:
    """Forward and backward of rows of the greatest length, every position scored."""
    loss_weights = run.loss_weights(state)
    needs = run.mix.needs(loss_weights)
    whole = _longest(run)
    devices = [run.device] if run.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        run.student.train()
        batch = next(iter(parts_of([whole], state))).to(run.device)
        signal = run.teacher_of(loss_weights, batch).observe(batch, needs.teacher)
        with run.precision.autocast():
            view = run.student.observe(batch, needs.student)
        view = run.hooks.view(view)
        score = run.mix.score(view, signal, batch, loss_weights, run.mix.counts([batch]))
        run.precision.backward(score.loss)
    run.optimizer.zero_grad()


def _longest(run: Run) -> Batch:
    """As many rows as a step has, of the greatest length that the data may have; with a mask if theirs have one."""
    shape = (run.config.train.rows_per_batch, run.config.data.max_length)
    if len(run.corpus.train.other_lengths):  # the teacher's rows and the spans cannot be made up
        by_length = np.argsort(-(run.corpus.train.lengths + run.corpus.train.other_lengths), kind="stable")
        return run.corpus.train.batch(np.resize(by_length, shape[0]))
    ids = torch.randint(0, run.student.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(ids)
    segments = torch.zeros_like(ids) if run.corpus.train.is_packed else None
    names = tuple(f"trial-{row}" for row in range(shape[0]))
    return Batch(ids, ones, ids.roll(-1, dims=1), ones, names, segments=segments)


def return_unused_memory() -> None:
    """Give back to the system what loading or training left behind."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Return freed memory to the system: glibc keeps it for as long as nobody asks.

    Activations of changing sizes are freed between blocks that stay, so that the heap of a long run grows.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


# ---- Where memory runs out


def within_memory(run: Run, state: RunState, work: Callable[[], T]) -> T:
    """The result of `work`, which uses `parts_of`. Where memory runs out in any process, all take smaller parts."""
    while True:
        result, shortage = None, ""
        try:
            result = work()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            shortage = reason_of(error)
            if not run.parallel.takes_smaller_parts:
                raise _no_room(
                    run, "with a sharded model micro-batches are not made smaller, and one does not fit", shortage
                ) from error
        # Outside of the handler: the error's traceback holds the tensors of the work that failed.
        if not run.parallel.any_of(bool(shortage)):
            return result  # type: ignore[return-value]
        _take_smaller_parts(run, state, shortage or "memory ran out in another process")


def evaluate_held_out(
    run: Run,
    state: RunState,
    student: Student,
    *,
    stage: str = "evaluating the student",
    read: Callable[[Batch], Batch] = lambda batch: batch,
    between: Callable[[], None] = never_stop,
    **options: Any,
) -> Evaluation:
    """`evaluate` on the held-out batches, in parts that fit. `read` says how the model reads a batch."""

    def work() -> Evaluation:
        with run.parallel.gathered():
            parts = list(parts_of([read(batch) for batch in run.eval_batches()], state))
            with run.stages.stage(stage, len(parts)) as advance:
                finished = iter([lambda: None])  # `between` is called before each batch: before the first none is done

                def count() -> None:
                    between()
                    next(finished, advance)()

                return evaluate(student, parts, between=count, **options)

    return within_memory(run, state, work)


def _take_smaller_parts(run: Run, state: RunState, shortage: str) -> None:
    rows = micro_batch_rows(run, state)
    run.optimizer.zero_grad()
    if rows <= 1:
        raise _no_room(run, "not even a micro-batch of one row fits", shortage)
    run.parallel.prepare(run.optimizer)
    state.micro_batch_parts *= 2
    state.shortages += 1
    gc.collect()
    POOL.clear()
    forget_free_memory()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
        # Where the model of memory says that half is still too much, do not try it. Main memory has no such bound.
        least, mode = state.micro_batch_parts, run.precision.mode
        state.micro_batch_parts = _predicted(
            run, lambda shapes: parts_that_fit(run.config, shapes, mode, least=least), least
        )
    now = micro_batch_rows(run, state)
    text = f"memory ran out: micro-batches of {now:,} rows instead of {rows:,}, and the same work again"
    if run.mix.planned.find("contrastive"):
        text += "; the contrastive term now compares fewer rows"
    run.log.write("note", text=text, micro_batch_rows=now, reason=shortage)


def _no_room(run: Run, what: str, shortage: str) -> OutOfMemory:
    return OutOfMemory(
        f"{what} into memory{_by_how_much(shortage)}: {shortage}",
        where=str(run.device),
        advice=[
            "recompute activations: --set student.gradient_checkpointing=true",
            f"shorter rows: --set data.max_length={max(run.config.data.max_length // 2, 1)}",
            "keep the teacher off the device: --set teacher.placement=offload",
            f"then continue from the last checkpoint: stillroom resume {run.folder}",
        ],
    )


def _by_how_much(reason: str) -> str:
    """What was missing, where the allocator's message says how much it wanted and how much was free."""
    wanted = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", reason)
    free = re.search(r"([\d.]+) (bytes|KiB|MiB|GiB) is free", reason)
    if not wanted or not free:
        return ""
    missing = float(wanted[1]) * _UNITS[wanted[2]] - float(free[1]) * _UNITS[free[2]]
    return f", {missing / 2**20:,.0f} MiB are missing" if missing > 0 else ""


# ---- Where snapshots are kept, and whether checkpoints are written in the background


def state_copies(config: Config, mode: str, optimizer: AdamW) -> Copies:
    """The copies of what this optimizer trains. Projectors are FP32 in every mode."""
    trained = []
    for group, cells in optimizer.cells.items():
        is_student = group != "projectors"
        own_mode = _state_mode(config, mode) if is_student and group not in optimizer.fp32_groups else "fp32"
        for cell in cells:
            held = bytes_per_parameter(own_mode, config.precision.moments, num_moments=len(cell.moments))
            trained.append((held, cell.parameter.numel(), is_student))
    return copies_of(config, trained)


def disk_note(config: Config, copies: Copies, folder: Path) -> str:
    """Say that the disk is too small for the checkpoints of the run; empty where it is not.

    One is written before the oldest is deleted. What lies in the folder already will be deleted for new ones.
    """
    kept = (copies.to_save + copies.best) * (config.checkpoint.keep + 1)
    disk = next((place for place in (folder, *folder.parents) if place.exists()), Path())
    free = shutil.disk_usage(disk).free + sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    if kept <= free:
        return ""
    return (
        f"{config.checkpoint.keep} checkpoints and one that is being written take {kept / 1e9:.1f} GB, and "
        f"{free / 1e9:.1f} GB are free on the disk of {folder}: --set checkpoint.keep=1, or another --out"
    )


def make_snapshots(
    config: Config,
    mode: str,
    optimizer: AdamW,
    checkpoints: CheckpointStore,
    log: EventLog,
    parallel: Parallel,
    *,
    is_gpu: bool = False,
) -> Snapshots:
    """Keep small snapshots in memory while they take a modest share of what is free, else use the checkpoints on disk.

    Large ones go into separate files on a CPU: main memory is there for the models.
    """

    def tell(text: str) -> None:
        log.write("note", text=text)

    copies, free = state_copies(config, mode, optimizer), main_memory().available
    if parallel.all_of(copies.go_to_disk(is_gpu=is_gpu)):
        return SnapshotRing(config.guard.snapshot_ring, DiskCopies(checkpoints.folder.parent, tell))
    if parallel.all_of(copies.leave_room(free, num_copies=parallel.num_copies)):
        return SnapshotRing(config.guard.snapshot_ring)
    log.write(
        "note",
        text=f"{config.guard.snapshot_ring} snapshots would take {copies.kept / 1e9:.1f} GB of {free / 1e9:.1f} GB "
        "free: a rollback returns to the newest checkpoint on disk instead",
    )
    return CheckpointSnapshots(checkpoints)


def make_saves(
    config: Config, mode: str, optimizer: AdamW, snapshots: Snapshots, log: EventLog, parallel: Parallel
) -> Saves:
    """Save in the background where that was asked for, or where memory is ample: not where snapshots have no room."""
    asked = config.checkpoint.background
    copies, free = state_copies(config, mode, optimizer), main_memory().available
    num_savers = parallel.num_copies if parallel.is_sharded else 1  # with ddp one process writes, and only it copies
    has_room = copies.with_saves_leave_room(free, num_copies=parallel.num_copies, num_savers=num_savers)
    is_ample = isinstance(snapshots, SnapshotRing) and snapshots.disk is None and parallel.all_of(has_room)
    if asked == "auto" and not is_ample:
        log.write(
            "note",
            text=f"a copy of the state to save takes {num_savers * copies.to_save / 1e9:.1f} GB of {free / 1e9:.1f} GB "
            "free: training waits while a checkpoint is written",
        )
    is_background = asked == "on" or (asked == "auto" and is_ample)
    beside = parallel.beside() if is_background and parallel.is_sharded else None
    return Saves(is_background=is_background, beside=beside)
