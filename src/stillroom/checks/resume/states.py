"""Compare what two runs left behind: steps, state and tensors, in that order, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stillroom.checkpoint import CheckpointStore, Saved
from stillroom.errors import CheckpointUnusable
from stillroom.telemetry import read_events

# Groups of a checkpoint in the order in which a difference is likely to arise; others follow by name.
_GROUPS = ("student", "projectors", "router", "optimizer", "random", "best")
_STATES = ("state", "precision", "guard", "num_updates", "canary", "canary_best")
_CLOCKS = frozenset({"seconds"})
_RECORDED = ("train_loss", "grad_norm", "lr", "loss_scale", "verdict")


@dataclass(frozen=True)
class Difference:
    """The first thing that is not the same in both runs."""

    kind: str  # "step", "state", "tensor" or "input"
    name: str
    what: str

    def to_dict(self) -> dict[str, str]:
        return dict(vars(self))


def last_state(folder: Path) -> Saved:
    """The newest checkpoint of a run."""
    saved = CheckpointStore(folder / "checkpoints").load_newest()
    if saved is None:
        raise CheckpointUnusable("the run left no checkpoint", where=str(folder), advice=["run it with more --steps"])
    return saved


def differences(one: Path, other: Path) -> Iterator[Difference]:
    """What differs between two runs' folders, the earliest and most telling first; nothing where all bits agree."""
    yield from _of_steps(steps_of(one), steps_of(other))
    mine, theirs = last_state(one), last_state(other)
    yield from _of_tensors(mine.tensors, theirs.tensors)
    yield from _of_scalars(mine, theirs)
    yield from _of_students(one / "student", other / "student")


def steps_of(folder: Path) -> dict[int, dict[str, Any]]:
    """What was recorded of each step that was applied."""
    events = read_events(folder / "events.jsonl")
    taken = [event for event in events if event["event"] == "step" and event["verdict"] == "keep"]
    return {event["step"]: {name: event.get(name) for name in _RECORDED} for event in taken}


def _of_steps(mine: Mapping[int, Any], theirs: Mapping[int, Any]) -> Iterator[Difference]:
    for step in sorted({*mine, *theirs}):
        one, other = mine.get(step), theirs.get(step)
        if one == other:
            continue
        if one is None or other is None:
            yield Difference("step", f"step {step}", f"only the {'resumed' if one is None else 'uncut'} run has it")
        else:
            said = [f"{name} {one[name]!r} and {other[name]!r}" for name in _RECORDED if one[name] != other[name]]
            yield Difference("step", f"step {step}", "; ".join(said))
        return  # every later step follows from this one


def _of_tensors(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Difference]:
    known = [*(group for group in _GROUPS if group in mine or group in theirs)]
    for group in [*known, *sorted({*mine, *theirs} - set(known))]:
        one, other = mine.get(group, {}), theirs.get(group, {})
        for name in dict.fromkeys((*one, *other)):
            if name not in one or name not in other:
                yield Difference("tensor", f"{group}/{name}", "only one of the two runs has it")
            elif what := gap(one[name], other[name]):
                yield Difference("tensor", f"{group}/{name}", what)


def gap(one: Tensor, other: Tensor) -> str:
    """How two tensors differ; empty where every bit is the same. NaN equals NaN of the same bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    bits = [tensor.contiguous().flatten().view(torch.uint8).view(-1, tensor.element_size()) for tensor in (one, other)]
    is_other = (bits[0] != bits[1]).any(-1)
    count = int(is_other.sum())
    if not count:
        return ""
    place = int(is_other.nonzero()[0])
    pair = [tensor.flatten()[place].item() for tensor in (one, other)]
    return f"{count:,} of {one.numel():,} values, the first at {place:,}: {pair[0]!r} uncut, {pair[1]!r} resumed"


def _of_scalars(mine: Saved, theirs: Saved) -> Iterator[Difference]:
    for key in _STATES:
        one, other = (_without_clocks(saved.scalars.get(key)) for saved in (mine, theirs))
        if one != other:
            yield Difference("state", key, f"{_shown(one, other)} uncut, {_shown(other, one)} resumed")


def _without_clocks(value: Any) -> Any:
    return {name: part for name, part in value.items() if name not in _CLOCKS} if isinstance(value, dict) else value


def _shown(value: Any, other: Any) -> str:
    """The part of a value that is not in the other one."""
    if isinstance(value, dict) and isinstance(other, dict):
        value = {name: part for name, part in value.items() if other.get(name) != part}
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _of_students(mine: Path, theirs: Path) -> Iterator[Difference]:
    for path in sorted(mine.glob("*.safetensors")):
        other = theirs / path.name
        if not other.exists() or path.read_bytes() != other.read_bytes():
            yield Difference("tensor", f"student/{path.name}", "the written student is not the same file")


def size_of(saved: Saved) -> tuple[int, int]:
    """How many tensors a checkpoint has, and their bytes."""
    tensors = [tensor for group in saved.tensors.values() for tensor in group.values()]
    return len(tensors), sum(tensor.numel() * tensor.element_size() for tensor in tensors)
