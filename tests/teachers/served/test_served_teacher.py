"""Laws of a teacher on a server: its answers are those of the same model here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cache_cases as cases
import numpy as np
import pytest
import tiny
import torch
from refusals import refused
from served_model import ServedModel, serving
from transformers import AutoTokenizer

from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import ServerGone, ServerUnusable
from stillroom.core.types import Needs, TopKSignal
from stillroom.data import Rows
from stillroom.models import open_teacher
from stillroom.teachers.live import LiveTeacher
from stillroom.teachers.served.teacher import ServedTeacher, open_server
from stillroom.teachers.signals import LOG_STEP, NOTHING, RowAnswer, SignalSpec
from stillroom.teachers.sparse import SparseTeacher

SPEC = SignalSpec("top_k", 12, 0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_trained(tmp_path_factory.mktemp("served") / "teacher", width=32, num_layers=1, steps=60)


@pytest.fixture(scope="module")
def local(folder: Path) -> SparseTeacher:
    loaded = open_teacher(TeacherConfig(model=str(folder)), torch.float32)
    live = LiveTeacher(loaded.network, vocab_size=tiny.VOCAB, device=CPU, offload=False, is_described=True)
    return SparseTeacher(live, SPEC)


@pytest.fixture
def served(folder: Path) -> Iterator[ServedModel]:
    with serving(folder) as running:
        yield running


def asked(served: ServedModel, folder: Path, spec: SignalSpec = SPEC, **requests: Any) -> ServedTeacher:
    wanted = {"retries": 2, "pause_seconds": 0.01, "timeout_seconds": 5.0, "concurrency": 4, **requests}
    section = TeacherConfig.model_validate({"model": str(folder), "server": served.url, "requests": wanted})
    words = AutoTokenizer.from_pretrained(folder)
    server = open_server(section, words, num_wanted=spec.exact, vocab_size=tiny.VOCAB)
    return ServedTeacher(server, spec, vocab_size=tiny.VOCAB, device=CPU, concurrency=section.requests.concurrency)


def rows() -> Rows:
    return cases.rows_of([5, 31, 17, 17, 2, 64, 9, 1], prompt=1)


def assert_same_answers(ours: RowAnswer, theirs: RowAnswer) -> None:
    """Ids but for ties, and log-probabilities to a step of what is stored; the tail to rounding of its mass."""
    assert ours.ids.shape == theirs.ids.shape
    is_moved = ours.ids != theirs.ids
    gaps = np.abs(ours.log_probs.astype(int) - theirs.log_probs.astype(int))
    assert gaps.max(initial=0) <= 1 and is_moved.sum() <= 0.02 * is_moved.size
    masses = [np.where(one.tail == NOTHING, 0.0, np.exp(-LOG_STEP * one.tail)) for one in (ours, theirs)]
    assert np.allclose(*masses, rtol=1.5 * LOG_STEP, atol=2e-6)
    assert np.abs(ours.label.astype(int) - theirs.label.astype(int)).max(initial=0) <= 1


def test_the_answers_are_those_of_the_same_model_on_this_machine(
    served: ServedModel, folder: Path, local: SparseTeacher
) -> None:
    batch = rows().batch(range(8))
    ours = asked(served, folder).answer_rows(batch, [SPEC])[0]
    theirs = local.answer_rows(batch, [SPEC])[0]
    for one, other in zip(ours, theirs, strict=True):
        assert_same_answers(one, other)
    assert served.most_at_once <= 4


def test_the_signal_in_a_run_is_that_of_the_same_model_on_this_machine(
    served: ServedModel, folder: Path, local: SparseTeacher
) -> None:
    teacher, batch = asked(served, folder), rows().batch([1, 6, 4])
    teacher.begin_window([batch], 0)
    ours, theirs = teacher.observe(batch, Needs()), local.observe(batch, Needs())
    assert isinstance(ours, TopKSignal) and isinstance(theirs, TopKSignal)
    assert torch.allclose(ours.log_probs, theirs.log_probs, atol=1.5 * LOG_STEP)
    assert ours.log_probs.shape == (batch.num_scored, 12)


def test_each_piece_of_a_packed_row_is_a_prompt_of_its_own(
    served: ServedModel, folder: Path, local: SparseTeacher
) -> None:
    plain = cases.rows_of([6, 9], seed=4)
    parts = [plain.batch([0]), plain.batch([1])]
    joined = {
        name: torch.cat([getattr(part, name) for part in parts], dim=1)
        for name in ("input_ids", "attention_mask", "targets", "target_bytes")
    }
    segments = torch.tensor([[0] * 6 + [1] * 9])
    packed = parts[0].__class__(**joined, sample_ids=("packed",), segments=segments)
    answer = asked(served, folder).answer_rows(packed, [SPEC])[0][0]
    alone = RowAnswer.join([local.answer_rows(part, [SPEC])[0][0] for part in parts])
    assert_same_answers(answer, alone)


def test_rows_of_the_next_window_are_asked_ahead_and_once(served: ServedModel, folder: Path) -> None:
    many = rows()
    windows = [[many.batch([0, 1])], [many.batch([2, 3])]]
    teacher = asked(served, folder)
    teacher._window = lambda cursor: windows[cursor % 2]
    before = served.num_asked
    teacher.begin_window(windows[0], 0)
    teacher.observe(windows[0][0], Needs())
    teacher.begin_window(windows[1], 1)
    teacher.observe(windows[1][0], Needs())
    teacher.begin_window(windows[0], 2)
    assert served.num_asked - before <= 4 + 3  # four rows, and a probe for each window


def test_faults_for_a_while_change_nothing_and_are_counted(served: ServedModel, folder: Path) -> None:
    teacher, batch = asked(served, folder, retries=4), rows().batch(range(6))  # one request may meet all four
    sound = teacher.answer_rows(batch, [SPEC])[0]
    served.faults = ["500", "429", "drop", "garbage"]
    again = teacher.answer_rows(batch, [SPEC])[0]
    assert all(cases.same(one, other) for one, other in zip(sound, again, strict=True))
    assert sum(count for name, count in teacher.facts().items() if name.startswith("repeated")) == 4


def test_a_stalled_answer_is_asked_for_again(served: ServedModel, folder: Path) -> None:
    teacher, batch = asked(served, folder, timeout_seconds=0.7), rows().batch([0, 4])
    served.faults = ["stall"]
    assert len(teacher.answer_rows(batch, [SPEC])[0]) == 2
    assert teacher.facts()["repeated_timeout"] == 1


def test_a_server_that_went_away_ends_resumable(served: ServedModel, folder: Path) -> None:
    teacher = asked(served, folder)
    served.faults = ["500"] * 50
    with pytest.raises(ServerGone) as caught:
        teacher.answer_rows(rows().batch(range(4)), [SPEC])
    assert caught.value.exit_code == 75


def test_answers_of_another_model_are_never_handed_over(served: ServedModel, folder: Path) -> None:
    teacher, batch = asked(served, folder), rows().batch(range(6))
    teacher.answer_rows(batch, [SPEC])
    served.other_after = served.num_asked + 3
    with refused(ServerUnusable, "", "probe"):
        teacher.answer_rows(batch, [SPEC])


def test_another_model_in_the_middle_of_a_run_ends_it(served: ServedModel, folder: Path) -> None:
    teacher, batch = asked(served, folder), rows().batch([0, 1])
    teacher.begin_window([batch], 0)
    teacher.observe(batch, Needs())
    served.other_after = served.num_asked

    def go_on() -> None:
        for step in (1, 2, 3):
            teacher.begin_window([batch], step)

    with refused(ServerUnusable, "", "probe"):
        go_on()


def test_nothing_is_kept_of_a_last_window_of_another_model(served: ServedModel, folder: Path) -> None:
    teacher, batch = asked(served, folder), rows().batch([0, 1])
    served.other_after = served.num_asked
    teacher.begin_window([batch], 0)
    teacher.observe(batch, Needs())
    with refused(ServerUnusable, "", "probe"):
        teacher.verify()


def test_a_tail_that_rounding_swallows_is_counted(folder: Path) -> None:
    """With all tokens but one kept, what they leave over is lost in the rounding of FP32."""
    spec = SignalSpec("top_k", tiny.VOCAB - 1, 0)
    with serving(folder) as served:
        teacher = asked(served, folder, spec)
        (answer,) = teacher.answer_rows(rows().batch([1]), [spec])[0]
    assert teacher.facts()["unresolved_tails"] > 0
    assert (answer.tail != NOTHING).all()


@pytest.mark.parametrize(("lie", "degree"), [("warm", "2"), ("cold", "0.4")])
def test_answers_of_another_temperature_are_refused(folder: Path, lie: str, degree: str) -> None:
    words, ids = tiny.tokenizer(), []
    for line in tiny.sentences(60, 3):
        ids += [*words(line)["input_ids"], 0]
    encoded = np.array(ids[: 20 * 33], np.int32)
    bounds = np.arange(0, len(encoded) + 1, 33)
    names = tuple(str(number) for number in range(20))
    known = Rows(
        cases.Encoded(encoded, np.ones_like(encoded), np.ones(len(encoded), bool), bounds, names, names),
        bounds[:-1],
        bounds[1:],
        pad_id=1,
    )
    batches = [known.batch([number]) for number in range(20)]
    with serving(folder) as honest:
        assert "temperature" in asked(honest, folder).try_rows(batches)
    with serving(folder, lie) as lying, refused(ServerUnusable, "", f"temperature {degree}"):
        asked(lying, folder).try_rows(batches)
