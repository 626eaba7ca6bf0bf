"""Laws of a live teacher with sparse answers: a row is answered alike in any company."""

from __future__ import annotations

import random
from pathlib import Path

import cache_cases as cases
import packed_texts
import pytest
import torch

from stillroom.config.schema import TeacherConfig
from stillroom.core.types import Batch, DenseSignal, Needs, SampledSignal
from stillroom.data import Rows
from stillroom.models import open_teacher
from stillroom.teachers.live import LiveTeacher
from stillroom.teachers.signals import RowAnswer, SignalSpec
from stillroom.teachers.sparse import SparseTeacher


@pytest.fixture(scope="module")
def teacher(world: Path) -> SparseTeacher:
    loaded = open_teacher(TeacherConfig(model=str(world / "teacher")), torch.float32)
    size = loaded.anatomy.vocab_rows
    live = LiveTeacher(loaded.network, vocab_size=size, device=torch.device("cpu"), offload=False, is_described=True)
    return SparseTeacher(live, SignalSpec("hybrid", 4, 6))


@pytest.fixture(scope="module")
def rows() -> Rows:
    return cases.rows_of([5, 31, 17, 17, 2, 64, 9], prompt=1)


def test_a_row_is_answered_alike_in_any_batch_and_padding(teacher: SparseTeacher, rows: Rows) -> None:
    alone = {number: teacher.answer_rows(rows.batch([number]), [teacher.spec])[0][0] for number in range(len(rows))}
    chance = random.Random(3)
    for _ in range(12):
        chosen = chance.sample(range(len(rows)), chance.randrange(1, len(rows) + 1))
        for number, answer in zip(chosen, teacher.answer_rows(rows.batch(chosen), [teacher.spec])[0], strict=True):
            assert cases.same(answer, alone[number])


def test_each_row_is_asked_by_itself_and_without_padding(
    teacher: SparseTeacher, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product's last bits may depend on what it is computed together with: on this machine or on another."""
    real, shapes = teacher.live.observe, []

    def seen(batch: Batch, needs: Needs) -> DenseSignal:
        shapes.append(tuple(batch.input_ids.shape))
        return real(batch, needs)

    monkeypatch.setattr(teacher.live, "observe", seen)
    teacher.answer_rows(rows.batch([1, 0, 5]), [teacher.spec])
    assert shapes == [(1, 31), (1, 5), (1, 64)]


def test_texts_that_share_a_row_do_not_see_each_other(teacher: SparseTeacher) -> None:
    batch = packed_texts.batch_of(packed_texts.texts())
    signal = teacher.observe(batch, Needs())
    dense, whole = teacher.whole_answer(batch, signal), teacher.live.observe(batch, Needs())
    assert isinstance(dense, DenseSignal) and torch.allclose(dense.hidden, whole.hidden, atol=1e-5)


def test_the_signal_is_that_of_the_dense_answer(teacher: SparseTeacher, rows: Rows) -> None:
    batch = rows.batch([0, 5, 2])
    signal = teacher.observe(batch, Needs())
    assert isinstance(signal, SampledSignal) and len(signal.ids) == batch.num_scored
    dense = teacher.whole_answer(batch, signal)
    assert isinstance(dense, DenseSignal)
    whole = teacher.live.observe(batch, Needs())
    assert torch.allclose(dense.hidden, whole.hidden, atol=1e-5)
    p = torch.softmax(dense.hidden @ dense.head.weight[: dense.head.num_real].T, dim=-1)
    assert torch.allclose(signal.weights[:, :4], p.gather(-1, signal.ids[:, :4]), rtol=0.005)
    assert torch.equal(signal.ids[:, :4], p.topk(4, dim=-1).indices)


def test_asked_together_as_on_a_gpu_the_answers_agree_to_rounding(teacher: SparseTeacher, rows: Rows) -> None:
    batch = rows.batch([0, 5, 2, 4])
    hidden, targets = teacher._together(batch)
    each, wanted = teacher._row_by_row(batch)
    for mine, theirs, one, other in zip(hidden, each, targets, wanted, strict=True):
        assert torch.equal(one, other) and torch.allclose(mine.hidden, theirs.hidden, atol=1e-5)


def test_where_memory_does_not_suffice_halves_are_asked(
    teacher: SparseTeacher, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sizes = teacher.live.observe, []

    def limited(batch: Batch, needs: Needs) -> DenseSignal:
        sizes.append(batch.input_ids.shape[0])
        if sizes[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(batch, needs)

    monkeypatch.setattr(teacher.live, "observe", limited)
    hidden, targets = teacher._together(rows.batch([0, 5, 2]))
    assert sizes == [3, 2, 1, 1, 1] and [len(part.hidden) for part in hidden] == [len(part) for part in targets]


def test_each_piece_of_a_packed_row_is_answered_as_if_alone(teacher: SparseTeacher, rows: Rows) -> None:
    parts = [rows.batch([0]), rows.batch([6])]
    names = ("input_ids", "attention_mask", "targets", "target_bytes")
    joined = {name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in names}
    packed = Batch(**joined, sample_ids=("packed",), segments=torch.tensor([[0] * 5 + [1] * 9]))
    spec = SignalSpec("top_k", 4, 0)
    (answer,) = teacher.answer_rows(packed, [spec])[0]
    alone = RowAnswer.join([teacher.answer_rows(part, [spec])[0][0] for part in parts])
    assert (answer.ids == alone.ids).all()
    assert abs(answer.log_probs.astype(int) - alone.log_probs.astype(int)).max() <= 1
