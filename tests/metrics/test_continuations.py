"""Greedy continuations of two models compared as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pair_tokenizers
import paired_batches
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from stillroom.data.two_tokenizers.align import common_prompt
from stillroom.metrics.evaluate import assess, open_model
from stillroom.metrics.questions import NUM_BYTES, num_common, text_agreement, written


@given(st.binary(max_size=20), st.binary(max_size=20), st.binary(max_size=20))
def test_the_common_beginning_is_the_longest_one(shared: bytes, one: bytes, other: bytes) -> None:
    found = num_common(shared + one, shared + other)
    assert found >= len(shared) and (shared + one)[:found] == (shared + other)[:found]
    assert (shared + one)[: found + 1] != (shared + other)[: found + 1] or found == min(
        len(shared + one), len(shared + other)
    )


@pytest.mark.parametrize("pair", [paired_batches.PAIR, ("unigram with bytes", "byte-level")])
def test_both_prompts_are_the_same_text(tmp_path: Path, pair: tuple[str, str]) -> None:
    """Up to the space that a tokenizer invents before a text."""
    rows = paired_batches.corpus(tmp_path, *pair, packing="rows").train
    student, teacher = (pair_tokenizers.built(name) for name in pair)
    opens = [rows.opens_document(index) for index in range(len(rows))]
    found = [common_prompt(rows.batch([index]), opens_document=is_first) for index, is_first in enumerate(opens)]
    assert sum(prompt is not None for prompt in found) > 0.8 * len(rows)
    assert pair != paired_batches.PAIR or not all(opens), "long texts have several rows"
    for prompt in (one for one in found if one is not None):
        texts = [
            tokenizer.decode(ids, skip_special_tokens=True).lstrip(" ")
            for tokenizer, ids in ((student, prompt.student), (teacher, prompt.teacher))
        ]
        assert texts[0] == texts[1] and texts[0]


def save(folder: Path, name: str, seed: int) -> str:
    tokenizer = pair_tokenizers.built(name)
    tiny.save_model(folder, "llama", vocab_size=len(tokenizer), with_tokenizer=False, width=24, num_layers=1, seed=seed)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_model_agrees_with_itself_and_not_with_a_random_one(tmp_path: Path) -> None:
    rows = paired_batches.corpus(tmp_path, "byte-level", "byte-level", packing="rows").train
    one, other = (open_model(save(tmp_path / str(seed), "byte-level", seed)) for seed in (1, 2))
    same = text_agreement(one, one, rows, num_prompts=12)
    assert same.agreement == 1.0 and same.interval == (1.0, 1.0)
    assert same.prompts >= 8 and same.prompts + same.left_out == 12, "a row of one span is left out and counted"
    found = text_agreement(one, other, rows, num_prompts=8)
    assert found.agreement is not None and 0.0 <= found.agreement < 0.9


def test_what_is_written_has_the_bytes_that_are_compared(tmp_path: Path) -> None:
    model = open_model(save(tmp_path / "model", "BPE with bytes", 3))
    prompts = [model.tokenizer("the cat sat")["input_ids"], model.tokenizer("a")["input_ids"]]
    texts = written(model.network, model.tokenizer, prompts, [False, False])
    assert all(text is not None and 0 < len(text) <= NUM_BYTES for text in texts)


def test_eval_beside_a_teacher_of_another_family_says_how_much_text_agrees(tmp_path: Path) -> None:
    student, teacher = save(tmp_path / "student", "byte-level", 1), save(tmp_path / "teacher", "BPE with bytes", 2)
    text = tiny.save_text(tmp_path / "text.jsonl", 30)
    result: dict[str, Any] = assess(student, str(text), teacher=teacher, max_length=64)
    row = result["student"]
    assert 0.0 <= row["text_agreement"] <= 1.0 and row["continued_prompts"] >= 8
    low, high = row["intervals"]["text_agreement"]
    assert low <= row["text_agreement"] <= high
    assert row["agreement"] is None and "text_agreement" not in result["teacher"]
    assert any("as text" in note for note in result["notes"])
    same = assess(student, str(text), teacher=student, max_length=64)
    assert same["student"].get("text_agreement") is None, "with one tokenizer agreement is counted by token"
