"""What one of several processes takes of a run: the whole with ddp, its part with fsdp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stillroom.planning.shapes import Sizes

_STATE = ("student weights", "masters", "residuals", "moments", "gradients")
_WEIGHT = 4  # bytes: what is sharded is FP32
_HALF = 2  # bytes of a weight that is gathered in FP16
LEARNS = "student learns"


@dataclass(frozen=True)
class Sharing:
    """How many processes there are, and whether each holds a part of the student."""

    num_processes: int = 1
    is_sharded: bool = False
    shard_size: int = 0  # processes that hold one copy of a sharded student; 0: all
    teacher_ranks: int = 0  # further processes, that hold the teacher

    @property
    def num_parts(self) -> int:
        return self.shard_size or self.num_processes

    @property
    def strategy(self) -> str:
        return "single" if self.num_processes == 1 else "fsdp" if self.is_sharded else "ddp"

    @property
    def notes(self) -> tuple[str, ...]:
        if self.num_processes == 1:
            return self._about_teacher
        text = f"bytes are those of one of {self.num_processes} processes with {self.strategy}; disk is that of all"
        first = "; the first one also reads the whole student back at the end, to write samples"
        copies = f"; groups of {self.num_parts} hold a copy each"
        shared = text + copies * (self.num_parts < self.num_processes) + first * self.is_sharded
        return (shared, *self._about_teacher)

    @property
    def _about_teacher(self) -> tuple[str, ...]:
        if not self.teacher_ranks:
            return ()
        of = f"{self.teacher_ranks} of {self.teacher_ranks + self.num_processes} processes"
        return (f"{of} hold the teacher: bytes are those of one that trains, which has the teacher's head alone",)

    def moment(self, name: str, parts: Mapping[str, int], sizes: Sizes, *, accumulates: bool) -> dict[str, int]:
        """The parts of a moment of a step in one process.

        DDP keeps buckets as large as the gradient all the time, and the gradients of the last micro-batch are views of
        them. FSDP2 holds the root (embeddings, last norm, head) whole from the first forward of a step to its last
        backward, and two layers: one at work, and one on its way.
        """
        if self.num_processes == 1:
            return dict(parts)
        if not self.is_sharded:
            own = {part: held for part, held in parts.items() if part != "gradients" or accumulates}
            return {**own, "gradient buckets": _WEIGHT * sizes.num_trained}
        shared = {part: -(-held // self.num_parts) if part in _STATE else held for part, held in parts.items()}
        if "masters" in parts:  # the parts are the masters, and FP16 weights are there while they are gathered
            part_of_each = -(-_WEIGHT * sizes.num_trained // self.num_parts)
            shared |= {"student weights": 0, "masters": part_of_each}
            shared |= {"gradients": part_of_each} if "gradients" in parts else {}
        if name != LEARNS:
            return shared
        return {**shared, **(_gathered_under_adapter(sizes) if sizes.frozen_bytes else _gathered(parts, sizes))}

    def kept(self, parts: Mapping[str, int]) -> dict[str, int]:
        """What is kept beside steps, snapshots and the best student, in one process."""
        if not self.is_sharded:
            return dict(parts)
        return {part: held if part == "teacher" else -(-held // self.num_parts) for part, held in parts.items()}


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
