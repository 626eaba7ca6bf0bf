"""A teacher that another process of the same job holds.

This process sends token ids and masks and gets the last hidden states at the scored positions back. It has the
teacher's head, so what the objectives see is what a teacher in this process gives, and no [tokens, vocabulary] tensor
is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stillroom.errors import BrokenAtStart, ConfigError, StillroomError
from stillroom.models import LoadedModel, Student
from stillroom.models.anatomy import Anatomy
from stillroom.models.length import num_positions
from stillroom.models.packed import packing_error, sequences_of
from stillroom.teachers.base import SignalKind, Teacher
from stillroom.types import IGNORED, Batch, DenseSignal, HeadWeights, Needs, StudentView

DESCRIBE, ASK, END = "describe", "ask", "end"


class Exchange(Protocol):
    """A connection to one other process, for one message at a time."""

    sent_bytes: int
    received_bytes: int

    def send(self, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None: ...

    def receive(self) -> tuple[dict[str, Any], list[Tensor]]: ...


# -- what is said ----------------------------------------------------------------------------------------


def description_of(loaded: LoadedModel) -> tuple[dict[str, Any], list[Tensor]]:
    """What a trainer has to know of the teacher: its sizes, and its head."""
    if not loaded.is_described:
        raise BrokenAtStart(
            "the teacher answers with its own logits, and a teacher on processes of its own sends hidden states",
            where="teacher.ranks",
            advice=["--set teacher.ranks=0", "use a teacher whose head is a linear layer"],
        )
    head = loaded.head
    header = {
        "anatomy": asdict(loaded.anatomy),
        "notes": list(loaded.notes),
        "scale": head.scale,
        "softcap": head.softcap,
        "num_positions": num_positions(loaded.network),
        "packing_error": packing_error(loaded.network),
    }
    return header, [head.weight, *([] if head.bias is None else [head.bias])]


def error_of(error: StillroomError) -> dict[str, Any]:
    """An error as a trainer raises it too."""
    told = {"what": error.what, "where": error.where, "advice": list(error.advice), "exit_code": error.exit_code}
    return {"error": told}


def question_of(batch: Batch) -> Tensor:
    """Ids, mask, whether a position is scored, and its piece of the row where rows have pieces. [3 or 4, B, L]"""
    planes = [batch.input_ids, batch.attention_mask, batch.targets != IGNORED]
    planes += [] if batch.segments is None else [batch.segments]
    return torch.stack([plane.to("cpu", torch.int64) for plane in planes])


def batch_of(question: Tensor) -> Batch:
    """The batch as the teacher reads it: its targets are where the trainer's are, their tokens are not told."""
    ids, mask, is_scored, *segments = question.unbind(0)
    targets = torch.where(is_scored == 1, 0, IGNORED)
    names = ("",) * len(ids)
    return Batch(ids, mask, targets, torch.zeros_like(ids), names, segments=segments[0] if segments else None)


# -- the trainer's end -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteModel(LoadedModel):
    """A teacher that is elsewhere: no network, and its head."""

    exchange: Any = None
    own_head: HeadWeights | None = None
    num_positions: int | None = None  # as models/length.py finds them
    packing_error: float = 0.0  # as models/packed.py measures it

    @property
    def head(self) -> HeadWeights:
        assert self.own_head is not None
        return self.own_head


def open_remote(exchange: Exchange, tokenizer: Any) -> RemoteModel:
    """Ask for the teacher's description. An error over there is raised here."""
    exchange.send({"do": DESCRIBE})
    header, tensors = exchange.receive()
    weight, *bias = _checked(header, tensors)
    head = HeadWeights(weight, bias[0] if bias else None, scale=header["scale"], softcap=header["softcap"])
    anatomy = Anatomy(**header["anatomy"])
    facts = {"num_positions": header["num_positions"], "packing_error": header["packing_error"]}
    return RemoteModel(
        None, tokenizer, anatomy, True, tuple(header["notes"]), exchange=exchange, own_head=head, **facts
    )


def _checked(header: Mapping[str, Any], tensors: list[Tensor]) -> list[Tensor]:
    """The tensors of an answer. Raise the error that is told instead of one."""
    if "error" not in header:
        return tensors
    told = header["error"]
    error = BrokenAtStart(told["what"], where=told["where"], advice=told["advice"])
    error.exit_code = told["exit_code"]
    raise error


class RemoteTeacher(Teacher):
    """Asks the process that holds the teacher."""

    kind: SignalKind = "dense"
    writes_text = False

    def __init__(self, loaded: RemoteModel, *, vocab_size: int, device: torch.device) -> None:
        head = loaded.head
        bias = None if head.bias is None else head.bias.to(device)
        size = vocab_size if vocab_size < len(head.weight) else None
        self.head = replace(head, weight=head.weight.to(device), bias=bias, vocab_size=size)
        self.vocab_size = vocab_size
        self.num_parameters = loaded.anatomy.num_parameters
        self._exchange: Exchange = loaded.exchange
        self._before = self._exchange.sent_bytes, self._exchange.received_bytes
        self._device = device
        self._num_questions = 0
        self.notes = ("another process holds the teacher: this one has its head, and the teacher writes no samples",)

    def observe(self, batch: Batch, needs: Needs) -> DenseSignal:
        if needs != Needs():
            raise ConfigError(
                "an objective looks inside the teacher, and teacher.ranks gives its last hidden states alone",
                where="teacher.ranks",
                advice=["--set teacher.ranks=0", "use objectives on the models' answers: kd and ce"],
            )
        self._exchange.send({"do": ASK}, [question_of(batch)])
        (hidden,) = _checked(*self._exchange.receive())
        self._num_questions += 1
        return DenseSignal(hidden.to(self._device), self.head, {})

    def as_model(self) -> Student:
        return RemoteStudent(self)

    def summary(self) -> dict[str, Any]:
        sent = self._exchange.sent_bytes - self._before[0]
        received = self._exchange.received_bytes - self._before[1]
        return {
            "teacher_elsewhere": {
                "questions": self._num_questions,
                "sent_bytes": sent,
                "received_bytes": received,
            }
        }


class RemoteStudent(Student):
    """The teacher elsewhere as a model that is evaluated."""

    def __init__(self, teacher: RemoteTeacher) -> None:
        self.model = nn.Module()
        self.vocab_size = teacher.vocab_size
        self.is_described = True
        self._teacher = teacher

    @property
    def num_parameters(self) -> int:
        return self._teacher.num_parameters

    def observe(self, batch: Batch, needs: Needs) -> StudentView:
        signal = self._teacher.observe(batch, needs)
        return StudentView(signal.hidden, signal.head, signal.taps, batch.positions, *sequences_of(batch))
