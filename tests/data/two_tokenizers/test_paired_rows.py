"""Rows of two tokenizers side by side: what stands in a span is the same text on both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pair_tokenizers
import paired_batches
import pytest
import tiny
import torch
from refusals import refused

from stillroom.config.schema import DataConfig
from stillroom.core.errors import ConfigError
from stillroom.core.types import IGNORED, Batch
from stillroom.data import Corpus, open_data
from stillroom.data.two_tokenizers.token_bytes import TokenBytes

CHAT_A = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CHAT_B = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)


def span_texts(batch: Batch, pair: tuple[str, str]) -> list[tuple[bytes, bytes, bool]]:
    """The bytes of each span on both sides, and whether it is exact."""
    assert batch.other is not None and batch.is_exact is not None
    found: dict[tuple[int, int], list[Any]] = {}
    for side, own in enumerate((batch, batch.other)):
        table = TokenBytes.of(pair_tokenizers.built(pair[side]))
        assert own.spans is not None
        for row, place in (own.spans >= 0).nonzero().tolist():
            target = int(own.targets[row, place])
            assert target != IGNORED, "every token of a span is a target"
            entry = found.setdefault((row, int(own.spans[row, place])), [b"", b"", False])
            special = bool(table.is_special[target])
            entry[side] += b"<end>" if special else table.bytes_of(target)
            entry[2] = entry[2] or (side == 0 and bool(batch.is_exact[row, place]))
    return [tuple(entry) for _, entry in sorted(found.items())]  # type: ignore[misc]


@pytest.mark.parametrize("packing", ["rows", "blocks", "packed"])
@pytest.mark.parametrize("pair", [("byte-level", "BPE with bytes"), ("characters", "byte-level with a prefix space")])
def test_both_sides_of_a_span_are_the_same_bytes(tmp_path: Path, packing: str, pair: tuple[str, str]) -> None:
    corpus = paired_batches.corpus(tmp_path, *pair, packing=packing)
    num_spans = 0
    for rows in (corpus.train, corpus.evaluation):
        batch = rows.batch(range(len(rows)))
        for ours, theirs, is_exact in span_texts(batch, pair):
            assert ours in (theirs, b" " + theirs) or theirs == b" " + ours, "but for a space that was invented"
            assert not is_exact or ours == theirs
            num_spans += 1
    assert num_spans + corpus.counters["spans_cut_by_rows"] == total_spans(corpus)


def total_spans(corpus: Corpus) -> int:
    assert corpus.coverage is not None
    return corpus.coverage.num_spans + corpus.counters["train_documents"] + corpus.counters["eval_documents"]


@pytest.mark.parametrize("packing", ["rows", "blocks"])
def test_a_token_of_the_teacher_is_a_target_once_and_nearly_all_are(tmp_path: Path, packing: str) -> None:
    corpus = paired_batches.corpus(tmp_path, packing=packing, max_length=12)
    rows = corpus.train
    batch = rows.batch(range(len(rows)))
    assert batch.other is not None
    paired = rows._encoded.paired
    assert paired is not None
    counted = np.bincount(batch.other.scored_targets.numpy(), minlength=500)
    there = np.bincount(paired.encoded.ids[:], minlength=500)
    assert (counted <= there).all()
    assert counted.sum() > 0.6 * there.sum()


def test_the_rows_of_one_tokenizer_are_as_ever(tmp_path: Path) -> None:
    path = tiny.save_text(tmp_path / "text.jsonl", 40)
    tokenizer = pair_tokenizers.built("byte-level")
    config = DataConfig(train=str(path), max_length=16)
    alone, beside = open_data(config, tokenizer), open_data(config, tokenizer, teacher_tokenizer=tokenizer)
    one, two = (corpus.train.batch(range(6)) for corpus in (alone, beside))
    assert one.other is None and one.spans is None and one.keys == two.keys
    assert two.other is not None and torch.equal(two.other.targets[two.targets != IGNORED], one.scored_targets)
    assert beside.coverage is not None and beside.coverage.share == 1.0
    assert alone.coverage is None


def test_the_end_of_a_document_is_a_span_of_both_end_marks(tmp_path: Path) -> None:
    corpus = paired_batches.corpus(tmp_path, packing="rows", max_length=128)
    batch = corpus.train.batch(range(4))
    assert [text for text in span_texts(batch, paired_batches.PAIR) if text[0] == b"<end>"] == [
        (b"<end>", b"<end>", True)
    ] * 4


def test_parts_of_a_batch_keep_their_spans(tmp_path: Path) -> None:
    batch = paired_batches.corpus(tmp_path, packing="rows").train.batch(range(5))
    whole = span_texts(batch, paired_batches.PAIR)
    assert [text for part in batch.parts(5) for text in span_texts(part, paired_batches.PAIR)] == whole
    assert batch.without_targets().num_scored == 0


# -- chats -----------------------------------------------------------------------------------------------


def chats(folder: Path, templates: tuple[str | None, str | None], **over: Any) -> tuple[Corpus, Any, Any]:
    turns = [
        {"role": "user", "content": "what keeps the room"},
        {"role": "assistant", "content": " the maid who keeps \u65e5\u672c "},
        {"role": "user", "content": "and then"},
        {"role": "assistant", "content": "the waters"},
    ]
    lines = [json.dumps({"messages": [*turns, {"role": "user", "content": str(number)}]}) for number in range(12)]
    (folder / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    both = pair_tokenizers.byte_level(), pair_tokenizers.llama_like()
    for tokenizer, template in zip(both, templates, strict=True):
        tokenizer.chat_template = template
    config = DataConfig(train=str(folder / "chats.jsonl"), max_length=256, **over)
    return open_data(config, both[0], teacher_tokenizer=both[1]), *both


@pytest.mark.parametrize("templates", [(CHAT_A, CHAT_B), (CHAT_B, CHAT_A), (None, CHAT_A), (CHAT_A, None)])
def test_answers_are_aligned_by_their_contents_and_marks_are_in_no_span(
    tmp_path: Path, templates: tuple[str | None, str | None]
) -> None:
    corpus, *both = chats(tmp_path, templates)
    batch = corpus.train.batch([0])
    assert batch.other is not None
    for own, tokenizer in zip((batch, batch.other), both, strict=True):
        assert own.spans is not None
        inside = own.targets[own.spans >= 0].tolist()
        text = tokenizer.decode(inside).replace(" ", "")
        expected = "themaidwhokeeps\u65e5\u672cthewaters"
        assert text.removesuffix("</s>") == expected, "no mark, no role and no question"
    assert corpus.coverage is not None and corpus.coverage.share == 1.0


def test_a_chat_that_the_teacher_cannot_print_is_learned_from_the_labels_alone(tmp_path: Path) -> None:
    refuses = "{{ raise_exception('no') }}"
    with refused(ConfigError, "teacher.model, student.model", "0.0%"):
        chats(tmp_path, (CHAT_A, refuses))
    one = "{% if messages[-1].content == '3' %}" + refuses + "{% endif %}"
    corpus, *_both = chats(tmp_path, (CHAT_A, one + CHAT_B))
    assert corpus.counters["unpaired_chats"] == 1
    rows = [*(corpus.train, corpus.evaluation)]
    batches = [one.batch(range(len(one))) for one in rows]
    empty = [row for batch in batches for row in (batch.spans >= 0).any(1).tolist() if not row]  # type: ignore[operator,union-attr]
    assert len(empty) == 1
