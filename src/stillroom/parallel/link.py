"""Processes that hold the teacher alone, and how a process that trains speaks with one of them.

The last processes of a job hold the teacher, the others train among themselves: their group, which torch takes for all
processes, has no teacher in it. A trainer and its teacher have a group of two of their own. Messages go through main
memory by gloo, one at a time: a header as JSON, then tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stillroom.errors import ConfigError, Interrupted, StillroomError
from stillroom.parallel.base import Parallel
from stillroom.parallel.processes import peer_errors

_TAG = 0


class Link:
    """One end of the connection between a trainer and the process that holds its teacher."""

    def __init__(self, store: Any, number: int, *, is_teacher: bool, timeout: timedelta) -> None:
        """`number` is the trainer's. Both ends wait here for each other."""
        own = dist.PrefixStore(f"teacher-of-{number}", store)  # type: ignore[attr-defined]
        with peer_errors():
            self._group: Any = dist.ProcessGroupGloo(own, int(is_teacher), 2, timeout)
        self._peer = int(not is_teacher)
        self._is_broken = False
        self.sent_bytes = self.received_bytes = 0

    def send(self, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        shapes = [[list(one.shape), str(one.dtype).removeprefix("torch.")] for one in tensors]
        text = json.dumps({**header, "tensors": shapes}).encode()
        with self._speaking():
            self._send(torch.tensor([len(text)], dtype=torch.int64))
            self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            for one in tensors:
                if one.numel():
                    self._send(one.detach().cpu().contiguous().view(-1).view(torch.uint8))

    def receive(self) -> tuple[dict[str, Any], list[Tensor]]:
        with self._speaking():
            (length,) = self._receive(torch.empty(1, dtype=torch.int64)).tolist()
            header = json.loads(bytes(self._receive(torch.empty(length, dtype=torch.uint8)).tolist()))
            tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in header.pop("tensors")]
            for one in tensors:
                if one.numel():
                    self._receive(one.view(-1).view(torch.uint8))
        return header, tensors

    def end(self, exit_code: int) -> None:
        """Tell the teacher's process how the run ended, and wait until it knows; nothing where it is gone."""
        if self._is_broken:
            return
        with suppress(Interrupted):
            self.send({"do": "end", "exit_code": exit_code})
            self.receive()

    def _send(self, tensor: Tensor) -> None:
        self._group.send([tensor], self._peer, _TAG).wait()
        self.sent_bytes += tensor.nbytes

    def _receive(self, tensor: Tensor) -> Tensor:
        self._group.recv([tensor], self._peer, _TAG).wait()
        self.received_bytes += tensor.nbytes
        return tensor

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        try:
            with peer_errors():
                yield
        except Interrupted:
            self._is_broken = True
            raise


class TeacherRank(Parallel):
    """A process that trains nothing: it answers the trainers at the other ends of its links."""

    strategy = "teacher"

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = list(links)


def check_teacher_ranks(ranks: int, size: int) -> None:
    """Raise if `size` processes cannot be `ranks` teachers and at least as many trainers."""
    if 2 * ranks > size:
        raise ConfigError(
            f"teacher.ranks = {ranks} of {size} processes leave {max(size - ranks, 0)} to train: each process that "
            "holds the teacher needs one that asks it",
            where="teacher.ranks",
            advice=[f"--set teacher.ranks={size // 2}", f"start at least {2 * ranks} processes"],
        )


def make_links(store: Any, rank: int, size: int, ranks: int, timeout: timedelta) -> list[Link]:
    """The links of a process: trainer i asks teacher i modulo their number."""
    num_trainers = size - ranks
    if rank < num_trainers:
        return [Link(store, rank, is_teacher=False, timeout=timeout)]
    asking = range(rank - num_trainers, num_trainers, ranks)
    return [Link(store, number, is_teacher=True, timeout=timeout) for number in asking]


@contextmanager
def telling_the_end(parallel: Parallel) -> Iterator[None]:
    """After the body, tell the process that holds the teacher the exit code, so that it ends alike."""
    exit_code = 1
    try:
        yield
        exit_code = 0
    except StillroomError as error:
        exit_code = error.exit_code
        raise
    finally:
        if parallel.link is not None:
            parallel.link.end(exit_code)
