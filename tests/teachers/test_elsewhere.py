"""Laws of a teacher in another process: its answers are those of one here, and what it cannot send is refused."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from stillroom.config import load_config
from stillroom.errors import BrokenAtStart, ConfigError, Interrupted, OutOfMemory
from stillroom.models import LoadedModel, open_teacher
from stillroom.teachers.answering import answer_all
from stillroom.teachers.elsewhere import RemoteTeacher, batch_of, open_remote, question_of
from stillroom.teachers.live import LiveTeacher
from stillroom.types import IGNORED, Batch, Needs

CPU = torch.device("cpu")


class End:
    """One end of a connection in memory."""

    def __init__(self, outbox: queue.Queue[Any], inbox: queue.Queue[Any]) -> None:
        self.outbox, self.inbox = outbox, inbox
        self.sent_bytes = self.received_bytes = 0

    def send(self, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        self.sent_bytes += sum(one.nbytes for one in tensors)
        self.outbox.put((dict(header), [one.clone() for one in tensors]))

    def receive(self) -> tuple[dict[str, Any], list[Tensor]]:
        message = self.inbox.get(timeout=60)
        if message is None:
            raise Interrupted("another process of this run is gone")
        return message


def linked() -> tuple[End, End]:
    there, back = queue.Queue[Any](), queue.Queue[Any]()
    return End(there, back), End(back, there)


@pytest.fixture(scope="module")
def loaded(world: Path) -> LoadedModel:
    return open_teacher(load_config(overrides=tiny.settings(world)).teacher, torch.float32)


def live_of(loaded: LoadedModel) -> LiveTeacher:
    size = loaded.anatomy.vocab_rows
    return LiveTeacher(loaded.network, vocab_size=size, device=CPU, offload=False, is_described=True)


class Answering:
    """A process that holds the teacher, as a thread."""

    def __init__(self, ends: Sequence[End], opened: Any) -> None:
        self.outcome: Any = None
        self._thread = threading.Thread(target=self._run, args=(ends, opened))
        self._thread.start()

    def _run(self, ends: Sequence[End], opened: Any) -> None:
        try:
            self.outcome = answer_all(ends, opened)
        except (Interrupted, BrokenAtStart, OutOfMemory) as error:
            self.outcome = error

    def ended(self) -> Any:
        self._thread.join(timeout=60)
        return self.outcome


def question() -> Batch:
    """Two rows, the second one shorter and in two pieces."""
    ids = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    targets = torch.where(mask == 1, ids.roll(-1, 1), IGNORED)
    targets[:, 0] = IGNORED
    segments = torch.zeros_like(ids)
    segments[1, 4:] = 1
    segments[1, 7:] = -1
    return Batch(ids, mask, targets, torch.ones_like(ids), ("a", "b"), segments=segments)


def test_a_question_holds_what_the_teacher_reads_and_no_target() -> None:
    asked = question()
    for batch in (asked, replace(asked, segments=None)):
        there = batch_of(question_of(batch))
        for name in ("input_ids", "attention_mask", "positions"):
            assert torch.equal(getattr(there, name), getattr(batch, name))
        assert (there.segments is None) == (batch.segments is None)
        assert set(there.scored_targets.tolist()) == {0}


def test_answers_from_another_process_are_those_of_a_teacher_here(loaded: LoadedModel) -> None:
    ours, theirs = linked()
    answering = Answering([theirs], lambda: (loaded, live_of(loaded)))
    remote = open_remote(ours, None)
    assert remote.network is None and remote.anatomy == loaded.anatomy
    teacher = RemoteTeacher(remote, vocab_size=loaded.anatomy.vocab_rows - 3, device=CPU)
    live, batch = live_of(loaded), question()
    for one in (batch, replace(batch, segments=None), batch.without_targets()):
        expected, found = live.observe(one, Needs()), teacher.observe(one, Needs())
        assert torch.equal(found.hidden, expected.hidden)
        assert torch.equal(found.head.weight, expected.head.weight)
    assert found.head.num_real == loaded.anatomy.vocab_rows - 3
    model = teacher.as_model()
    assert model.num_parameters == loaded.anatomy.num_parameters
    assert torch.equal(model.observe(batch, Needs()).hidden, live.observe(batch, Needs()).hidden)
    assert teacher.summary()["teacher_elsewhere"]["questions"] == 4
    ours.send({"do": "end", "exit_code": 3})
    assert answering.ended() == 3


def test_what_looks_inside_the_teacher_is_refused_by_name(loaded: LoadedModel) -> None:
    ours, theirs = linked()
    answering = Answering([theirs], lambda: (loaded, live_of(loaded)))
    teacher = RemoteTeacher(open_remote(ours, None), vocab_size=60, device=CPU)
    with pytest.raises(ConfigError, match="looks inside the teacher"):
        teacher.observe(question(), Needs(hidden_layers=frozenset({0})))
    ours.send({"do": "end", "exit_code": 0})
    assert answering.ended() == 0


def test_a_teacher_that_cannot_be_described_is_refused_at_both_ends(loaded: LoadedModel) -> None:
    ours, theirs = linked()
    answering = Answering([theirs], lambda: (replace(loaded, is_described=False), live_of(loaded)))
    with pytest.raises(BrokenAtStart, match="answers with its own logits"):
        open_remote(ours, None)
    ours.send({"do": "end", "exit_code": 20})
    assert answering.ended().exit_code == 20


def test_a_teacher_that_fails_is_an_error_with_its_exit_code_at_every_trainer(loaded: LoadedModel) -> None:
    pairs = [linked(), linked()]
    live = live_of(loaded)
    answering = Answering([theirs for _ours, theirs in pairs], lambda: (loaded, live))
    teachers = [RemoteTeacher(open_remote(ours, None), vocab_size=60, device=CPU) for ours, _theirs in pairs]
    teachers[0].observe(question(), Needs())

    def fail(*_arguments: Any) -> None:
        raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")

    live.observe = fail  # type: ignore[method-assign]
    for teacher in teachers:
        with pytest.raises(BrokenAtStart, match="not enough memory") as caught:
            teacher.observe(question(), Needs())
        assert caught.value.exit_code == OutOfMemory.exit_code
    for ours, _theirs in pairs:
        ours.send({"do": "end", "exit_code": OutOfMemory.exit_code})
    assert isinstance(answering.ended(), OutOfMemory)


def test_where_one_trainer_is_lost_the_others_are_answered_until_they_end(loaded: LoadedModel) -> None:
    (lost, one), (ours, two) = linked(), linked()
    answering = Answering([one, two], lambda: (loaded, live_of(loaded)))
    lost.outbox.put(None)
    teacher = RemoteTeacher(open_remote(ours, None), vocab_size=60, device=CPU)
    assert len(teacher.observe(question(), Needs()).hidden) == question().num_scored
    ours.send({"do": "end", "exit_code": 75})
    assert isinstance(answering.ended(), Interrupted)
