"""The token store with two tokenizers: both sides' tokens and the spans, made once."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pair_tokenizers
import pytest
import tiny
import torch

from stillroom.config.schema import DataConfig
from stillroom.core.types import Batch
from stillroom.data import Corpus, Rows, open_data
from stillroom.data import store as store_module

STUDENT, TEACHER = "byte-level", "BPE with bytes"
CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end>{% endfor %}"
OTHER_CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


def write_records(path: Path, count: int, seed: int = 0) -> None:
    lines = []
    for number, text in enumerate(tiny.sentences(count, seed)):
        if number % 3 == 0:
            lines.append(json.dumps({"text": text}))
        elif number % 3 == 1:
            lines.append(json.dumps({"prompt": text[:20], "completion": f" {text} {number}"}))
        else:
            turns = [{"role": "user", "content": text[:15]}, {"role": "assistant", "content": text}]
            lines.append(json.dumps({"messages": turns}))
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def tokenizers(student: str = STUDENT, teacher: str = TEACHER) -> tuple[Any, Any]:
    both = tuple(copy.deepcopy(pair_tokenizers.built(name)) for name in (student, teacher))
    both[0].chat_template, both[1].chat_template = CHAT, OTHER_CHAT
    return both[0], both[1]


def opened(spec: str, cache: str, student: Any, teacher: Any, **over: Any) -> Corpus:
    config = DataConfig(train=spec, cache=cache, **{"max_length": 24, "packing": "rows", **over})
    return open_data(config, student, teacher_tokenizer=teacher)


def assert_same_batch(left: Batch, right: Batch) -> None:
    for one in fields(Batch):
        mine, theirs = getattr(left, one.name), getattr(right, one.name)
        if isinstance(mine, Batch):
            assert_same_batch(mine, theirs)
        elif isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs), one.name
        else:
            assert mine == theirs, one.name


def assert_same_rows(left: Rows, right: Rows) -> None:
    assert len(left) == len(right) > 0
    for first in range(0, len(left), 8):
        indices = range(first, min(first + 8, len(left)))
        assert_same_batch(left.batch(indices), right.batch(indices))


@pytest.mark.parametrize("packing", ["rows", "blocks", "packed"])
@pytest.mark.parametrize("per_batch", [7, 50_000])
def test_stored_pairs_are_those_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, per_batch: int
) -> None:
    """Both sides' tokens, targets, spans, exactness, coverage and counters, made and found again."""
    monkeypatch.setattr(store_module, "BATCH_RECORDS", per_batch)
    for number in range(2):
        write_records(tmp_path / f"{number}.jsonl", 40, number)
    spec, both = str(tmp_path / "*.jsonl"), tokenizers()
    memory = opened(spec, "off", *both, packing=packing, train_share=0.7)
    for _ in range(2):
        stored = opened(spec, str(tmp_path / "cache"), *both, packing=packing, train_share=0.7)
        assert_same_rows(memory.train, stored.train)
        assert_same_rows(memory.evaluation, stored.evaluation)
        assert stored.coverage == memory.coverage and memory.coverage is not None and memory.coverage.num_spans
        assert stored.counters == memory.counters


def test_a_second_start_tokenizes_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_records(tmp_path / "d.jsonl", 40)
    student, teacher = tokenizers()
    first = opened(str(tmp_path / "d.jsonl"), str(tmp_path / "cache"), student, teacher)

    def fails(*_arguments: Any, **_options: Any) -> None:
        pytest.fail("documents were tokenized again")

    monkeypatch.setattr("stillroom.data.tokenize.Encoder.tokenized", fails)
    monkeypatch.setattr("stillroom.data.two_tokenizers.encode.document_spans", fails)
    second = opened(str(tmp_path / "d.jsonl"), str(tmp_path / "cache"), student, teacher)
    assert_same_rows(first.train, second.train)


def test_an_entry_is_shared_with_no_other_pair(tmp_path: Path) -> None:
    write_records(tmp_path / "d.jsonl", 30)
    spec, cache = str(tmp_path / "d.jsonl"), str(tmp_path / "cache")
    student, teacher = tokenizers()
    opened(spec, cache, student, teacher)
    opened(spec, cache, student, tokenizers(teacher="unigram with bytes")[1])
    opened(spec, cache, student, None)
    opened(spec, cache, teacher, student)
    assert len({path.parent.name for path in (tmp_path / "cache").glob("*/*/manifest.json")}) == 4
    assert len(list((tmp_path / "cache").glob("*/*/manifest.json"))) == 4


def test_a_damaged_entry_is_named_and_made_again(tmp_path: Path) -> None:
    write_records(tmp_path / "d.jsonl", 30)
    both = tokenizers()
    memory = opened(str(tmp_path / "d.jsonl"), str(tmp_path / "cache"), *both)
    for name in ("teacher_ids", "sizes"):
        (victim,) = (tmp_path / "cache").glob(f"*/*/{name}.bin")
        contents = bytearray(victim.read_bytes())
        contents[-7] ^= 1
        victim.write_bytes(bytes(contents))
        again = opened(str(tmp_path / "d.jsonl"), str(tmp_path / "cache"), *both)
        assert any(str(victim) in note for note in again.notes)
        assert_same_rows(memory.train, again.train)
