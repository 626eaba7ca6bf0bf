"""Laws of a teacher that answers from a cache: a row meets its own answer, wherever it stands."""

from __future__ import annotations

import math
import random
import threading
from pathlib import Path
from typing import Any

import cache_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.core.errors import CacheDamaged
from stillroom.core.types import IGNORED, Batch, Needs, SampledSignal, TopKSignal
from stillroom.data import Loader, Rows
from stillroom.teachers.cache.reader import Cache, CachedTeacher
from stillroom.teachers.signals import RowAnswer, SignalSpec, signal_of

CPU = torch.device("cpu")
LENGTHS = [4, 9, 9, 13, 20, 6, 7, 5, 11, 16, 3]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rows, Cache]:
    rows = cases.rows_of(LENGTHS, prompt=2)
    return rows, cases.write(tmp_path_factory.mktemp("cache"), rows)


def expected(batch: Batch) -> SampledSignal:
    """Asked live, row by row."""
    signal = signal_of(RowAnswer.join(cases.Matrices().answers(batch)), cases.HYBRID)
    assert isinstance(signal, SampledSignal)
    return signal


def assert_same(one: Any, other: SampledSignal) -> None:
    assert torch.equal(one.ids, other.ids) and torch.equal(one.weights, other.weights)
    assert torch.equal(one.entropy, other.entropy)


@settings(max_examples=25)
@given(
    batch_size=st.integers(1, 6),
    accumulation=st.integers(1, 3),
    seed=st.integers(0, 100),
    num_ranks=st.integers(1, 2),
    repeats=st.integers(1, 2),
)
def test_shuffled_rebatched_over_epochs_and_processes_every_row_meets_its_own_answer(
    stored: tuple[Rows, Cache], batch_size: int, accumulation: int, seed: int, num_ranks: int, repeats: int
) -> None:
    rows, cache = stored
    for rank in range(num_ranks):
        loader = Loader(
            rows, batch_size=batch_size, accumulation=accumulation, seed=seed, rank=rank, num_ranks=num_ranks
        )
        teacher = CachedTeacher(cache, device=CPU, window=loader.window)
        for cursor in range(3 * loader.num_windows):
            window = loader.window(cursor)
            for _ in range(repeats):  # a retry takes the same window again
                teacher.begin_window(window, cursor)
                for batch in (part for whole in window for part in whole.parts(repeats)):
                    (signal,) = teacher.training.answers(batch, Needs())
                    assert signal is not None and len(signal.entropy) == batch.num_scored  # type: ignore[union-attr]
                    assert_same(signal, expected(batch))


def test_what_is_kept_ahead_is_two_windows_and_no_more(stored: tuple[Rows, Cache]) -> None:
    rows, cache = stored
    loader = Loader(rows, batch_size=2, accumulation=2)
    teacher = CachedTeacher(cache, device=CPU, window=loader.window)
    for cursor in range(2 * loader.num_windows):
        teacher.begin_window(loader.window(cursor), cursor)
        assert len(teacher._ahead) <= 8
    ahead = {key for batch in loader.window(cursor + 1) for key in batch.keys}
    assert ahead <= set(teacher._ahead)


def test_reading_happens_in_a_thread_of_its_own(stored: tuple[Rows, Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, cache = stored
    loader = Loader(rows, batch_size=2)
    teacher = CachedTeacher(cache, device=CPU, window=loader.window)
    threads = set()
    real = cache.answer
    monkeypatch.setattr(cache, "answer", lambda key: (threads.add(threading.current_thread().name), real(key))[1])
    for cursor in range(3):
        window = loader.window(cursor)
        teacher.begin_window(window, cursor)
        for batch in window:
            teacher.observe(batch, Needs())
    assert threads and all(name.startswith("stillroom-cache") for name in threads)


def test_one_corrupted_row_is_caught_when_it_is_met_and_named(tmp_path: Path) -> None:
    rows = cases.rows_of([10] * 8)
    cache = cases.write(tmp_path, rows, shard_tokens=40)
    shard = cache.shards[1]
    cases.spoil(shard.path, -1)
    teacher = CachedTeacher(Cache(tmp_path), device=CPU)
    bad = shard.keys[-1].tobytes().hex()
    for number in range(8):
        batch = rows.batch([number])
        if batch.keys[0] != bad:
            assert_same(teacher.observe(batch, Needs()), expected(batch))
            continue
        teacher.begin_window([batch], 0)
        with pytest.raises(CacheDamaged) as caught:
            teacher.observe(batch, Needs())
        assert shard.path.name in str(caught.value) and "row 3" in str(caught.value) and bad in str(caught.value)


def test_rows_without_targets_have_no_answer_and_ask_for_none(stored: tuple[Rows, Cache]) -> None:
    rows, cache = stored
    teacher = CachedTeacher(cache, device=CPU)
    assert len(teacher.observe(rows.batch([0, 1]).without_targets(), Needs()).ids) == 0  # type: ignore[union-attr]
    whole = rows.batch([0, 1, 2])
    targets = whole.targets.clone()
    targets[1] = IGNORED
    some = Batch(whole.input_ids, whole.attention_mask, targets, whole.target_bytes, whole.sample_ids)
    signal = teacher.observe(some, Needs())
    assert isinstance(signal, SampledSignal) and len(signal.ids) == some.num_scored
    assert torch.isfinite(signal.weights).all()


def test_a_row_that_is_not_there_is_unusable_and_counted(stored: tuple[Rows, Cache]) -> None:
    _rows, cache = stored
    teacher = CachedTeacher(cache, device=CPU)
    strange = cases.rows_of([8], seed=9).batch([0])
    signal = teacher.observe(strange, Needs())
    assert isinstance(signal, SampledSignal) and signal.weights.isnan().all() and len(signal.ids) == 8
    assert teacher.summary()["teacher_signal"]["unknown_positions"] == 8


def test_its_own_perplexity_is_that_of_the_stored_targets(stored: tuple[Rows, Cache]) -> None:
    rows, cache = stored
    batches = [rows.batch([0, 1, 2]), rows.batch([3, 4])]
    teacher = CachedTeacher(cache, device=CPU)
    live = [answer for batch in batches for answer in cases.Matrices().answers(batch)]
    losses = [-value for answer in live for value in answer.label_log_probs]
    told = teacher.own_metrics(batches)
    assert told is not None and told["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)))
    assert told["bits_per_byte"] == pytest.approx(sum(losses) / math.log(2) / len(losses))


@pytest.mark.parametrize("kind", ["top_k", "renormalised"])
def test_top_k_answers_come_back_with_and_without_their_tail(tmp_path: Path, kind: str) -> None:
    spec = SignalSpec(kind, 5, 0)  # type: ignore[arg-type]
    rows = cases.rows_of([6, 7])
    teacher = CachedTeacher(cases.write(tmp_path, rows, spec), device=CPU)
    signal = teacher.observe(rows.batch([1, 0]), Needs())
    assert isinstance(signal, TopKSignal) and teacher.kind == "top-k" and teacher.num_exact == 5
    total = torch.logsumexp(signal.log_probs, -1)
    if kind == "renormalised":
        assert torch.allclose(total, torch.zeros_like(total), atol=1e-6) and signal.tail_log_mass.isneginf().all()
        mass = teacher.cache.mean_mass
        assert mass is not None and any(f"{mass:.4f}" in note for note in teacher.notes)
    else:
        assert (total < 0).all() and torch.allclose(torch.logaddexp(total, signal.tail_log_mass), total * 0, atol=1e-6)


def test_random_access_is_the_same_as_any_other(stored: tuple[Rows, Cache]) -> None:
    rows, cache = stored
    teacher, chance = CachedTeacher(cache, device=CPU), random.Random(0)
    for _ in range(20):
        batch = rows.batch(chance.sample(range(len(rows)), chance.randrange(1, 6)))
        assert_same(teacher.observe(batch, Needs()), expected(batch))
