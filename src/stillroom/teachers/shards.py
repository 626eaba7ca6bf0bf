"""A teacher of which each process of a run holds a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from stillroom.config import Config
from stillroom.errors import ConfigError
from stillroom.models import LoadedModel
from stillroom.models.anatomy import layers_if_any
from stillroom.parallel import Parallel
from stillroom.parallel.processes import Processes
from stillroom.parallel.torch_version import check_torch
from stillroom.teachers.placement import Placement, StreamedModel
from stillroom.types import HeadWeights

_WHERE = "teacher.placement"


class Parts(Protocol):
    """A network in parts, whose layers come and go by themselves."""

    def gather(self) -> None:
        """Make what is outside of layers whole."""

    def release(self) -> None: ...

    def facts(self) -> dict[str, int]: ...


class Shards(Placement):
    """What is outside of layers is whole while the teacher is asked, and from the first answer of a window to its end.

    The head is needed until the student's backward: inside a window it is the gathered one, elsewhere a copy.
    """

    writes_text = False  # each token would gather every layer
    is_shared = True

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._visits = 0
        self._is_whole = False
        self._is_window = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        if not self._is_whole:
            self._parts.gather()
            self._is_whole = True
        self._visits += 1
        try:
            yield
        finally:
            self._visits -= 1
            if not self._is_window:
                self._release()

    def begin_window(self) -> None:
        self._is_window = True

    def end_window(self) -> None:
        self._is_window = False
        self._release()

    def lasting(self, head: HeadWeights) -> HeadWeights:
        if self._is_window or head.is_identity:
            return head
        return replace(head, weight=head.weight.clone(), bias=None if head.bias is None else head.bias.clone())

    def facts(self) -> dict[str, Any]:
        return {"teacher_shards": self._parts.facts()}

    def _release(self) -> None:
        if self._visits == 0 and self._is_whole:
            self._parts.release()
            self._is_whole = False


def reads_layers_one_by_one(config: Config, parallel: Parallel | None) -> bool:
    """Whether a process needs no more of the teacher than its part: a student that is cut from it needs the whole."""
    has_peers = parallel is not None and parallel.size > 1
    return has_peers and config.teacher.placement == "shard" and config.student.init != "shrink"


def shard_teacher(
    config: Config,
    loaded: LoadedModel | None,
    parallel: Parallel,
    device: torch.device,
    *,
    tell: Callable[[str], object],
) -> Placement | None:
    """Leave this process a part of each weight of the teacher where that was asked for, else None."""
    if loaded is None or config.teacher.placement != "shard":
        return None
    if not isinstance(parallel, Processes):
        tell("teacher.placement = 'shard' has no effect: there is one process, which holds the whole teacher")
        return None
    if config.train.batch_size == "auto" and device.type != "cpu":
        raise ConfigError(
            "a sharded teacher does not work with train.batch_size = 'auto': a trial that runs out of memory in one "
            "process leaves the others waiting",
            where="train.batch_size",
            advice=["give train.batch_size a number", "--set teacher.placement=device"],
        )
    check_torch(is_sharded=True)
    from stillroom.parallel.frozen import shard_frozen  # it takes half a second to import

    blocks = layers_if_any(loaded.network)
    options: dict[str, Any] = {"device": device.type, "where": _WHERE}
    if isinstance(loaded, StreamedModel) and loaded.stream is not None:
        loaded.stream.settle(device)
        loaded.stream.stop()
        options["bring"] = loaded.stream.bring
    parts = shard_frozen(parallel, loaded.network, blocks, **options)
    held, whole = (parts.facts()[name] / 1e6 for name in ("held_bytes", "whole_bytes"))
    tell(f"the teacher is sharded: this process holds {held:,.1f} MB of {whole:,.1f} MB between answers")
    return Shards(parts)
