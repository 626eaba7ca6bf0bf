"""The bytes of a run by part: on the device, in main memory and on disk.

On the device three moments of a step may be the largest: the teacher answers, the student's forward and backward, the
update. Each is a sum of parts, and the plan is the largest of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stillroom.config import Config
from stillroom.planning.shapes import Micro, Shapes, Sizes
from stillroom.planning.sharing import LEARNS
from stillroom.planning.target import Target
from stillroom.planning.trace import StudentTrace
from stillroom.precision import bytes_per_parameter
from stillroom.precision.resolve import choose
from stillroom.precision.storage import Split, Stochastic
from stillroom.teachers.spec import AUTO, cache_spec, teacher_dtype

CONTEXT = 500_000_000  # of CUDA and the workspaces of its libraries: an allowance, it was not measured here
_UPDATE_SCRATCH = 1 << 27  # the optimizer takes tensors in buckets of so much scratch; a larger one is alone in its own
# FP32 copies of both moments 8, random bits 8, and what rounding one of them takes 9: they are rounded one by one.
_MOMENTS_SCRATCH = 25
_QUANTISED = {"int8": 1.0, "bnb-8bit": 1.0, "bnb-4bit": 0.5625}  # bytes a weight, scales included
_SNAPSHOT_SHARE = 0.4
COPY = "copy to save"  # of the state, in main memory


@dataclass(frozen=True)
class Layout:
    """The bytes of a configuration in one precision."""

    mode: str
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

    def to_dict(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "total": self.total,
            "largest_at": self.moment,
            "moments": dict(self.moments),
            "device": dict(self.device),
            "main_memory": dict(self.host),
            "disk": dict(self.disk),
        }


def chosen_mode(config: Config, shapes: Shapes) -> tuple[str, str]:
    """The precision that the run will have, and why."""
    sizes, _ = shapes.student(config, micro_of(config, "fp32"), None)
    return choose(config.precision.mode, shapes.target.facts, sizes.num_trained, moments=config.precision.moments)


def micro_of(config: Config, mode: str, *, recomputes: bool | None = None, is_open: bool = False) -> Micro:
    train = config.train
    return Micro(
        mode=mode,
        rows=train.rows_per_batch,
        length=config.data.max_length,
        accumulates=train.gradient_accumulation_steps > 1,
        recomputes=config.student.gradient_checkpointing if recomputes is None else recomputes,
        is_open=is_open,
    )


def lay_out(config: Config, shapes: Shapes, mode: str, *, num_tokens: int | None = None) -> Layout:
    target = shapes.target
    asks = shapes.uses_teacher(config)
    is_live = asks and not config.teacher.cache and not config.teacher.server
    is_there = is_live or (asks and config.teacher.cache == AUTO and not config.teacher.server)
    dtype = _teacher_dtype(config, shapes)
    micro = micro_of(config, mode)
    teacher = work = None
    if is_there:
        teacher, work = shapes.teacher(config, micro.rows, micro.length, dtype)
    sizes, trace = shapes.student(config, micro, (teacher, dtype) if is_live and teacher is not None else None)
    state = _state(config, mode, sizes)
    if target.is_card:
        state["CUDA context"] = CONTEXT
    if trace.head_kept:
        state["head scratch"] = trace.head_kept
    stays, visits, at_home = _teacher_bytes(config, teacher, target)
    gradients = _gradient_bytes(config, mode, sizes)
    answer = work.answer if work is not None and is_live else _sparse_bytes(config, micro) if asks else 0
    moments: dict[str, dict[str, int]] = {}
    if work is not None and not target.sharing.teacher_ranks:
        name = "teacher answers" if is_live else "cache is written"
        held = {"gradients": gradients} if micro.accumulates and is_live else {}
        moments[name] = {"teacher": stays + visits, "teacher at work": work.work, **state, **held}
        stays = stays if is_live else 0
    resident = {"teacher": stays} if stays else {}
    moments[LEARNS] = {**resident, "teacher's answer": answer, **_merged(state, _named(trace.at_peak))}
    moments["update"] = {**resident, **state, "gradients": gradients, "update scratch": _scratch(config, mode, sizes)}
    share = target.sharing
    moments = {name: share.moment(name, one, sizes, accumulates=micro.accumulates) for name, one in moments.items()}
    largest = max(moments, key=lambda name: sum(moments[name].values()))
    return Layout(
        mode=mode,
        moment=largest,
        device={name: held for name, held in moments[largest].items() if held},
        moments={name: sum(parts.values()) for name, parts in moments.items()},
        host=share.kept(_host(config, mode, sizes, at_home, target.main_memory)),
        disk=_disk(config, mode, sizes, num_tokens),
        on_cpu=not target.is_card,
        sizes=sizes,
        teacher=teacher,
        trace=trace,
    )


def _teacher_dtype(config: Config, shapes: Shapes) -> torch.dtype:
    """As `teacher_dtype` says of a device that is here; of one that is not, by its facts."""
    if config.teacher.dtype != "auto" or not shapes.target.is_card:
        return teacher_dtype(config, shapes.target.device)
    return torch.bfloat16 if shapes.target.facts.has_native_bf16 else torch.float16


_NAMES = {"casts": "autocast casts", "data": "batch", "head": "head gradients and scratch"}


def _named(parts: Mapping[str, int]) -> dict[str, int]:
    return {_NAMES.get(name, name): held for name, held in parts.items()}


def _merged(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def _state(config: Config, mode: str, sizes: Sizes) -> dict[str, int]:
    """What the student takes between steps. Vectors have FP32 masters in every FP16 mode, an adapter is FP32."""
    held = bytes_per_parameter(_state_mode(config, mode), config.precision.moments)
    master = bytes_per_parameter("fp16-master").extra
    is_half = held.weights == 2
    extra = sum(count * (master if is_half and axes < 2 else held.extra) for count, axes in sizes.trained)
    parts = {"student weights": sizes.num_trained * held.weights + sizes.frozen_bytes}
    if extra:
        parts["residuals" if mode == "fp16-split" else "masters"] = extra
    parts["moments"] = sizes.num_trained * held.moments
    return parts


def _state_mode(config: Config, mode: str) -> str:
    """An adapter is trained in FP32 in every mode."""
    return "fp32" if config.student.adapter is not None else mode


def _gradient_bytes(config: Config, mode: str, sizes: Sizes) -> int:
    accumulates = config.train.gradient_accumulation_steps > 1
    return sizes.num_trained * bytes_per_parameter(_state_mode(config, mode), accumulates=accumulates).gradients


def _scratch(config: Config, mode: str, sizes: Sizes) -> int:
    """FP32 copies that an update takes: of a bucket, or of the largest tensor where that is more."""
    own = _state_mode(config, mode)
    is_half = own.startswith("fp16-") and own != "fp16-mixed" and config.train.gradient_accumulation_steps == 1
    storage = {"fp16-split": Split.scratch_bytes, "fp16-sr": Stochastic.scratch_bytes}.get(own, 4 * is_half)
    each = storage + (_MOMENTS_SCRATCH if config.precision.moments == "bfloat16" else 0)
    total = each * sizes.num_trained
    largest = each * max((count for count, _axes in sizes.trained), default=0)
    return max(largest, min(total, _UPDATE_SCRATCH))


def _teacher_bytes(config: Config, teacher: Sizes | None, target: Target) -> tuple[int, int, int]:
    """Bytes that stay on the device, that come while it answers, and that are in main memory for a card."""
    if teacher is None:
        return 0, 0, 0
    whole = teacher.parameters * teacher.itemsize
    head = teacher.vocabulary * teacher.width * teacher.itemsize
    if target.sharing.teacher_ranks:
        return head, 0, 0
    kind = config.teacher.quantisation
    if kind != "none":
        return int(whole - teacher.linear * (teacher.itemsize - _QUANTISED[kind])), 0, 0
    if config.teacher.placement == "stream" and teacher.layer_bytes:
        rest = whole - sum(teacher.layer_bytes)
        return rest, sum(sorted(teacher.layer_bytes)[-2:]), 0
    if config.teacher.placement == "shard" and target.sharing.num_processes > 1:
        # What is outside of layers is gathered from the first answer of a window to its end.
        outside = whole - sum(teacher.layer_bytes)
        return -(-whole // target.sharing.num_parts) + outside, sum(sorted(teacher.layer_bytes)[-2:]), 0
    if config.teacher.placement == "offload" and target.is_card:
        return head, whole - head, whole
    return whole, 0, 0


def _sparse_bytes(config: Config, micro: Micro) -> int:
    """A stored answer in memory: ids of eight bytes and probabilities of four."""
    spec = cache_spec(config)
    return micro.rows * micro.length * (12 * spec.width + 4 * spec.is_paired)


def _host(config: Config, mode: str, sizes: Sizes, at_home: int, free: int) -> dict[str, int]:
    """Main memory. Snapshots that would take more than a share of it are not kept there."""
    held = bytes_per_parameter(_state_mode(config, mode), config.precision.moments)
    num_snapshots = config.guard.snapshot_ring + (config.guard.on_exhausted == "reset")
    parts = {
        "snapshots": num_snapshots * held.snapshot * sizes.num_trained,
        "best student": held.best * sizes.num_trained,
    }
    is_short = sum(parts.values()) > _SNAPSHOT_SHARE * free
    copied = held.snapshot * sizes.num_trained
    is_ample = sum(parts.values()) + copied <= _SNAPSHOT_SHARE * free
    if config.checkpoint.background == "on" or (config.checkpoint.background == "auto" and is_ample):
        parts[COPY] = copied
    if is_short:
        parts["snapshots"] = 0
    if at_home:
        parts["teacher"] = at_home
    return {name: size for name, size in parts.items() if size}


def _disk(config: Config, mode: str, sizes: Sizes, num_tokens: int | None) -> dict[str, int]:
    held = bytes_per_parameter(_state_mode(config, mode), config.precision.moments)
    each = held.weights + held.extra + held.moments + held.best
    parts = {
        "checkpoints": each * (config.checkpoint.keep + 1) * sizes.num_trained,  # one is written before one is deleted
        "student": 4 * sizes.num_trained + sizes.frozen_bytes,
    }
    if num_tokens and config.teacher.cache:
        parts["teacher's cache"] = int(num_tokens * cache_bytes(config))
    return parts


def cache_bytes(config: Config) -> float:
    """Bytes a position of a cache: straight lines through the sizes that docs/cache.md measured. An estimate."""
    spec = cache_spec(config)
    targets = 4.0 if spec.is_paired else 0.0  # one FP32 a position, before it is packed
    if spec.kind == "target":
        return targets
    if spec.draws and spec.exact:
        return targets + 25.3 + 2.8 * spec.exact + 0.4 * (spec.draws - 12)
    return targets + (0.9 * spec.draws if spec.draws else 10.0 + 2.35 * spec.exact)
