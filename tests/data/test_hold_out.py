"""Laws of holding out: enough to measure with, chosen by content alone, a smaller share inside a larger one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from stillroom.config.schema import DataConfig
from stillroom.data import Record, open_data
from stillroom.data.corpus import ENOUGH_HELD_OUT, ReadDocuments, held_out


def records(count: int, seed: int = 0) -> list[Record]:
    return [Record(f"r{number}", ((f"text {seed} {number}", True),), f"{seed}/{number}") for number in range(count)]


def hold_out(records: list[Record], share: float, spec: str, *, enough: int = 1) -> tuple[list[Record], list[Record]]:
    """`held_out` of records: (training, held out)."""
    documents = ReadDocuments(records)
    is_held = held_out(documents.groups(), share, spec, enough=enough)
    return list(documents.take(~is_held).records), list(documents.take(is_held).records)


def keys(found: list[Record]) -> set[str]:
    return {record.key for record in found}


@pytest.mark.parametrize(
    ("count", "least"), [(2, 1), (9, 1), (20, 4), (40, 8), (100, ENOUGH_HELD_OUT), (1000, ENOUGH_HELD_OUT)]
)
def test_enough_is_held_out_to_measure_with(count: int, least: int) -> None:
    for seed in range(5):
        train, held = hold_out(records(count, seed), 0.05, "spec", enough=ENOUGH_HELD_OUT)
        assert len(held) >= least and len(held) + len(train) == count
        assert len(held) == max(least, len(hold_out(records(count, seed), 0.05, "spec")[1]))


@given(
    count=st.integers(2, 120), shares=st.lists(st.floats(0.001, 0.9), min_size=2, max_size=2), seed=st.integers(0, 9)
)
def test_a_smaller_share_is_part_of_a_larger_one(count: int, shares: list[float], seed: int) -> None:
    small, large = (
        keys(hold_out(records(count, seed), share, "spec", enough=ENOUGH_HELD_OUT)[1]) for share in sorted(shares)
    )
    assert small <= large


@given(order=st.permutations(range(30)), repeats=st.integers(1, 3))
def test_what_is_held_out_depends_on_the_contents_alone(order: list[int], repeats: int) -> None:
    plain = records(30)
    shuffled = [plain[number] for number in order] * repeats
    assert keys(hold_out(shuffled, 0.05, "a", enough=20)[1]) == keys(hold_out(plain, 0.05, "b", enough=20)[1])


def test_with_enough_documents_the_share_is_what_was_asked_for() -> None:
    for share in (0.05, 0.3):
        asked = hold_out(records(2000), share, "spec")
        assert hold_out(records(2000), share, "spec", enough=ENOUGH_HELD_OUT) == asked


def opened(path: Path, count: int, **over: Any) -> Any:
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in tiny.sentences(count, 4)), encoding="utf-8")
    return open_data(DataConfig(train=str(path), **over), tiny.tokenizer())


def test_of_few_documents_more_are_held_out_and_the_log_says_so(tmp_path: Path) -> None:
    corpus = opened(tmp_path / "d.jsonl", 100)
    assert corpus.counters["eval_documents"] >= ENOUGH_HELD_OUT - 1  # equal lines fall together
    assert any("data.eval_share = 0.05 would be" in note for note in corpus.notes)
    assert not any("too few to say" in note for note in corpus.notes)


def test_too_few_documents_to_measure_with_are_told(tmp_path: Path) -> None:
    corpus = opened(tmp_path / "d.jsonl", 20)
    assert 1 < corpus.counters["eval_documents"] < 8
    assert any("too few to say how sure a result is" in note for note in corpus.notes)
