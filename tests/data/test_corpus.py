"""Laws of the data room: bytes, targets, splits, order."""

from __future__ import annotations

import json
import sys
import sysconfig
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from stillroom import builtin as stdlib
from stillroom.config.schema import DataConfig
from stillroom.core.errors import ConfigError, StillroomError
from stillroom.core.types import IGNORED, Batch
from stillroom.data import Encoder, Loader, Record, Rows, Tally, fixed_batches, open_data, open_eval, pack
from stillroom.data.records import content_key
from stillroom.data.sources import pieces_of
from stillroom.data.tokenize import bytes_between, even_ends, token_ends

END = "<|endoftext|>"
LINES = [f"line {number}: the quick brown fox jumps over {number * 7} lazy dogs" for number in range(200)]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|endoftext|>{% endgeneration %}{% else %}{{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
)
FORGETFUL_TEMPLATE = (  # prints the last answer otherwise than the earlier ones
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last %}(last){% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(*, trims: bool = False, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE; `trims` leaves the space before a word out of its offsets, as GPT-2 does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trims)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(LINES, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


TOKENIZERS = {trims: make_tokenizer(trims=trims) for trims in (False, True)}


class SlowTokenizer:
    """One token a word, no offsets."""

    is_fast = False
    eos_token, eos_token_id, pad_token_id, chat_template = "[END]", 1, 0, None

    def __call__(self, text: Any, **options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[2 + len(word) for word in one.split()] for one in text]}

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        raise NotImplementedError


def document(text: str, name: str = "doc") -> Record:
    return Record(name, ((text, True),), content_key(text))


def write_jsonl(path: Path, values: list[Any]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


def rows_of(tokenizer: Any, texts: list[str], *, max_length: int = 16, packing: Any = "blocks") -> Rows:
    records = [document(text, f"doc{number}") for number, text in enumerate(texts)]
    return pack(Encoder(tokenizer, Tally())(records), packing, max_length, Tally(), pad_id=tokenizer.eos_token_id or 0)


def scored_text(tokenizer: Any, rows: Rows) -> str:
    """What the targets of all rows spell, without special tokens."""
    batches = fixed_batches(rows, 4)
    ids = [int(t) for batch in batches for row in batch.targets for t in row if t != IGNORED]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def same(left: Batch, right: Batch) -> bool:
    names = ("input_ids", "attention_mask", "targets", "target_bytes")
    return (left.sample_ids, left.index) == (right.sample_ids, right.index) and all(
        torch.equal(getattr(left, name), getattr(right, name)) for name in names
    )


# -- bytes -----------------------------------------------------------------------------------------------

HARD_TEXT = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("\r\n \t\u0301\u200d\U0001f600\U0001f468\u00e9a\ufeff"),
    ),
    min_size=1,
)


@given(text=HARD_TEXT, trims=st.booleans())
@settings(deadline=None, max_examples=200)
def test_bytes_of_tokens_sum_to_the_bytes_of_the_document(text: str, trims: bool) -> None:
    encoded = Encoder(TOKENIZERS[trims], Tally())([document(text)])
    assert int(encoded.num_bytes.sum()) == len(text.encode("utf-8"))
    assert (encoded.num_bytes >= 0).all()


@given(parts=st.lists(st.tuples(HARD_TEXT, st.booleans()), min_size=1, max_size=5), trims=st.booleans())
@settings(deadline=None, max_examples=200)
def test_bytes_of_scored_tokens_are_the_bytes_of_scored_segments(parts: list[tuple[str, bool]], trims: bool) -> None:
    encoded = Encoder(TOKENIZERS[trims], Tally())([Record("x", tuple(parts), "")])
    wanted = sum(len(text.encode("utf-8")) for text, is_scored in parts if is_scored)
    assert int(encoded.num_bytes[encoded.is_scored].sum()) == wanted
    assert int(encoded.num_bytes.sum()) == sum(len(text.encode("utf-8")) for text, _ in parts)


def test_a_token_inside_a_character_has_no_bytes_of_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = Encoder(tokenizer, Tally())([document("\U0001f600")])
    assert encoded.num_bytes.tolist() == [4, 0, 0, 0, 0]  # four byte tokens and the end mark


def test_characters_a_tokenizer_skips_belong_to_the_next_token() -> None:
    assert bytes_between("ab \u00e9", np.array([2, 4])).tolist() == [2, 3]
    assert token_ends("ab c  ", [(0, 2), (3, 4)]).tolist() == [2, 6]  # after the last token: to the last


def test_ends_of_tokens_never_fall() -> None:
    assert token_ends("abcde", [(0, 3), (1, 2), (3, 4), (4, 5)]).tolist() == [3, 3, 4, 5]


def test_tokens_without_offsets_share_the_bytes_evenly_and_say_so() -> None:
    tally = Tally()
    record = Record("x", (("one two ", False), ("three", True)), "")
    encoded = Encoder(SlowTokenizer(), tally)([record])
    assert encoded.num_bytes.tolist() == [4, 4, 5, 0]
    assert encoded.is_scored.tolist() == [False, False, True, True]
    assert any("no offsets" in note for note in tally.notes)
    assert even_ends("abcdefg", 3).tolist() == [2, 4, 7]


def test_special_token_strings_in_text_stay_text(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = Encoder(tokenizer, Tally())([document(f"say {END} twice {END}")])
    assert (encoded.ids == tokenizer.eos_token_id).sum() == 1 and encoded.ids[-1] == tokenizer.eos_token_id
    assert tokenizer("a" + END)["input_ids"][-1] == tokenizer.eos_token_id  # the tokenizer is left as it was


# -- rows ------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8), max_length=st.integers(8, 40))
@settings(deadline=None, max_examples=50)
def test_blocks_score_each_token_but_the_first_exactly_once(lengths: list[int], max_length: int) -> None:
    texts = [chr(97 + number) * length for number, length in enumerate(lengths)]
    tokenizer = TOKENIZERS[False]
    stream = Encoder(tokenizer, Tally())([document(text) for text in texts]).ids
    rows = rows_of(tokenizer, texts, max_length=max_length)
    targets = [int(t) for batch in fixed_batches(rows, 3) for row in batch.targets for t in row if t != IGNORED]
    assert targets == stream[1:].tolist()
    assert rows.num_targets == len(stream) - 1
    assert all(2 <= len(rows.row(i)) <= max_length + 1 for i in range(len(rows)))


def test_bytes_of_all_targets_are_the_corpus_less_its_first_token(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = rows_of(tokenizer, LINES[:20])
    first = len(str(tokenizer.decode(rows.row(0)[:1].tolist())))
    total = sum(int(batch.target_bytes.sum()) for batch in fixed_batches(rows, 4))
    assert total == sum(len(line) for line in LINES[:20]) - first


def test_targets_are_the_next_inputs(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = next(fixed_batches(rows_of(tokenizer, LINES[:20]), 4))
    assert torch.equal(batch.targets[:, :-1], batch.input_ids[:, 1:])
    assert torch.equal(batch.targets[0, -1], batch.input_ids[1, 0])


def test_padding_is_never_scored(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = rows_of(tokenizer, ["a", "a much longer text with many words", "b c"], max_length=64, packing="rows")
    (batch,) = fixed_batches(rows, 8)
    padding = batch.attention_mask == 0
    assert padding.any()
    assert (batch.targets[padding] == IGNORED).all() and (batch.target_bytes[padding] == 0).all()
    assert (batch.input_ids[padding] == tokenizer.eos_token_id).all()
    assert (batch.attention_mask.diff(dim=1) <= 0).all()  # on the right only


def test_a_record_longer_than_its_row_is_cut_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    tally = Tally()
    records = [Record("long", (("z" * 5, False), ("q" * 50, True)), ""), document("q" * 5)]
    encoded = Encoder(tokenizer, tally)(records)
    rows = pack(encoded, "rows", 10, tally)
    assert len(rows.row(0)) == 11 and len(rows.row(1)) == 6
    assert tally.counters["truncated_records"] == 1
    assert tally.counters["truncated_tokens"] == tally.counters["truncated_targets"] == len(encoded.ids) - 17
    assert rows.num_tokens == 17


@pytest.mark.parametrize("packing", ["rows", "packed"])
def test_long_records_are_dropped_or_split_and_an_answer_ends_only_where_it_does(
    packing: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    records = [
        Record("long", (("z" * 5, False), ("q" * 50, True)), ""),
        Record("short", (("z", False), ("q" * 5, True)), ""),
        document("a" * 30),
    ]
    encoded, tally = Encoder(tokenizer, Tally())(records), Tally()
    rows = pack(encoded, packing, 10, tally, on_long="drop")
    assert tally.counters["dropped_records"] == 1 and not tally.counters["truncated_records"]
    assert rows.num_tokens == len(encoded.ids) - int(encoded.bounds[1]) and rows.num_documents == 2
    tally = Tally()
    rows = pack(encoded, packing, 10, tally, on_long="split")
    targets = Counter(int(t) for batch in fixed_batches(rows, 3) for row in batch.targets for t in row if t != IGNORED)
    is_target = encoded.is_scored[:].copy()
    is_target[encoded.bounds[:-1]] = False
    assert targets == Counter(encoded.ids[:][is_target].tolist())
    assert targets[tokenizer.eos_token_id] == 3 and not +tally.counters
    assert [name for name, _, _ in rows.prompts(4) if not name.startswith("doc")] == ["long", "short"]


def test_blocks_leave_no_record_out(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    spec = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"z{n}", "completion": "q" * 50} for n in range(30)])
    with refused(ConfigError, "data.on_long"):
        open_data(DataConfig(train=spec, packing="blocks", on_long="drop", max_length=8), tokenizer)


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8), max_length=st.integers(8, 40))
@settings(deadline=None, max_examples=50)
def test_a_long_text_is_cut_into_rows_that_lose_nothing(lengths: list[int], max_length: int) -> None:
    """Each document's tokens but its first are targets exactly once, in rows that never hold two documents."""
    texts = [chr(97 + number) * length for number, length in enumerate(lengths)]
    tokenizer = TOKENIZERS[False]
    encoded = Encoder(tokenizer, Tally())([document(text) for text in texts])
    tally = Tally()
    rows = pack(encoded, "rows", max_length, tally)
    targets = [int(t) for batch in fixed_batches(rows, 3) for row in batch.targets for t in row if t != IGNORED]
    pairs = zip(encoded.bounds[:-1], encoded.bounds[1:], strict=True)
    assert targets == [int(token) for start, end in pairs for token in encoded.ids[start + 1 : end]]
    assert all(len(rows.row(i)) <= max_length + 1 for i in range(len(rows)))
    assert all((rows.row(i)[:-1] != tokenizer.eos_token_id).all() for i in range(len(rows)))
    assert tally.counters["truncated_tokens"] == 0
    assert (rows.num_tokens, rows.num_documents) == (len(encoded.ids), len(texts))


def test_rows_without_a_target_are_dropped_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    tally = Tally()
    records = [Record("long", (("z" * 50, False), ("a", True)), ""), Record("short", (("z", False), ("a", True)), "")]
    rows = pack(Encoder(tokenizer, tally)(records), "rows", 10, tally)
    assert [rows.sample_id(i) for i in range(len(rows))] == ["short"]
    assert tally.counters["rows_without_targets"] == 1


def test_rows_are_named_after_the_document_they_start_in(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = rows_of(tokenizer, ["z" * 20, "q" * 20], max_length=16)  # 21 tokens each with the end mark
    assert [rows.sample_id(i) for i in range(len(rows))] == ["doc0@0", "doc0@16", "doc1@11"]
    assert rows.groups == ("doc0", "doc0", "doc1")


# -- order -----------------------------------------------------------------------------------------------


def test_a_window_is_a_pure_function_of_seed_and_index(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = rows_of(tokenizer, LINES[:60])
    one, two = (Loader(rows, batch_size=3, accumulation=2, seed=5) for _ in range(2))
    count = 2 * one.num_windows + 3
    forward = {index: one.window(index) for index in range(count)}
    backward = {index: two.window(index) for index in reversed(range(count))}
    for index in range(count):
        assert len(forward[index]) == len(backward[index])
        assert all(same(left, right) for left, right in zip(forward[index], backward[index], strict=True))
    other = Loader(rows, batch_size=3, accumulation=2, seed=6)
    assert not same(forward[0][0], other.window(0)[0])


def test_a_resumed_loader_goes_on_where_it_was(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = rows_of(tokenizer, LINES[:30])
    whole = [b for index in range(12) for b in Loader(rows, batch_size=4, accumulation=3).window(index)]
    resumed = Loader(rows, batch_size=4, accumulation=3)
    tail = [b for index in range(7, 12) for b in resumed.window(index)]
    assert all(same(left, right) for left, right in zip(whole[-len(tail) :], tail, strict=True))
    assert [b.index for b in whole] == list(range(len(whole)))


def test_an_epoch_is_a_permutation_and_epochs_differ(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = rows_of(tokenizer, LINES[:60])
    loader = Loader(rows, batch_size=4, accumulation=2)
    windows = [loader.window(index) for index in range(2 * loader.num_windows)]
    halves = (windows[: loader.num_windows], windows[loader.num_windows :])
    epochs = [[name for window in half for batch in window for name in batch.sample_ids] for half in halves]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(rows.sample_id(i) for i in range(len(rows)))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "accumulation", "num_batches", "num_windows", "last"),
    [(7, 1, 4, 7, 2, 3), (8, 1, 4, 8, 2, 4), (9, 2, 4, 5, 2, 1), (1, 8, 8, 1, 1, 1), (35, 4, 4, 9, 3, 1)],
)
def test_windows_never_cross_epochs(
    num_rows: int, batch_size: int, accumulation: int, num_batches: int, num_windows: int, last: int
) -> None:
    rows = rows_of(TOKENIZERS[False], ["z" * 7] * num_rows, packing="rows")
    loader = Loader(rows, batch_size=batch_size, accumulation=accumulation)
    assert (loader.num_batches, loader.num_windows) == (num_batches, num_windows)
    sizes = [len(loader.window(index)) for index in range(2 * num_windows)]
    assert sizes == 2 * ([accumulation] * (num_windows - 1) + [last])
    assert loader.window(num_windows)[0].index == num_batches
    seen = sum(len(batch.sample_ids) for index in range(num_windows) for batch in loader.window(index))
    assert seen == num_rows


def test_fixed_batches_keep_the_order_and_stop_when_told(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = rows_of(tokenizer, LINES[:20])
    names = [name for batch in fixed_batches(rows, 3) for name in batch.sample_ids]
    assert names == [rows.sample_id(i) for i in range(len(rows))]
    limited = [name for batch in fixed_batches(rows, 3, max_batches=2) for name in batch.sample_ids]
    assert len(limited) == 6 and limited[0] == names[0] and names.index(limited[-1]) >= len(names) * 5 // 6 - 1


def test_rows_and_batches_refuse_lengths_that_cannot_be(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = Encoder(tokenizer, Tally())([document(line) for line in LINES[:4]])
    rows = pack(encoded, "rows", 16, Tally())
    bad: list[Any] = [
        lambda: pack(encoded, "rows", 0, Tally()),
        lambda: pack(encoded, "heaps", 16, Tally()),  # type: ignore[arg-type]
        lambda: Rows(encoded, np.array([0, 4]), np.array([4])),
        lambda: Rows(encoded, np.array([4]), np.array([4])),
        lambda: Rows(encoded, np.array([0]), np.array([len(encoded.ids) + 1])),
        lambda: replace(encoded, bounds=encoded.bounds[:-1]),
        lambda: replace(encoded, num_bytes=encoded.num_bytes[1:]),
        lambda: replace(encoded, has_prompt=(True,)),
        lambda: list(fixed_batches(rows, 0)),
        lambda: list(fixed_batches(rows, 4, -1)),
        lambda: Loader(rows, batch_size=4, rank=2, num_ranks=2),
        lambda: Loader(rows, batch_size=0),
    ]
    for attempt in bad:
        with pytest.raises(StillroomError):
            attempt()
    for chosen in ([], [-1], [len(rows)]):
        with pytest.raises(IndexError):
            rows.batch(chosen)
    with pytest.raises(IndexError):
        rows.row(-1)


# -- shapes ----------------------------------------------------------------------------------------------

SHAPES = [
    ({"text": "plain words"}, "plain words"),
    ({"prompt": "ask ", "completion": "tell"}, "tell"),  # the border lies inside what would be one token
    ({"question": "why", "answer": "because"}, "because"),
    ({"instruction": "add", "input": "1 2", "output": "three"}, "three"),
    ({"instruction": "greet", "output": "hello there"}, "hello there"),
    ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo man"}]}, "yo man\n"),
]


@pytest.mark.parametrize(("value", "answer"), SHAPES)
def test_prompt_tokens_are_not_scored(tmp_path: Path, value: dict[str, Any], answer: str) -> None:
    tokenizer = TOKENIZERS[True]
    spec = write_jsonl(tmp_path / "one.jsonl", [value])
    config = DataConfig(packing="rows", max_length=64)
    found = scored_text(tokenizer, open_eval(spec, tokenizer, config).evaluation)
    if "text" in value:  # the first token of a row has nothing before it
        assert answer.endswith(found) and found
    else:
        assert found == answer
        trained = open_eval(spec, tokenizer, config.model_copy(update={"train_on_prompt": True}))
        assert len(scored_text(tokenizer, trained.evaluation)) > len(answer)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED_TEMPLATE])
def test_a_chat_scores_what_the_assistant_says_and_its_end(tmp_path: Path, template: str) -> None:
    tokenizer = make_tokenizer(chat_template=template)
    turns = [("system", "be kind"), ("user", "hi"), ("assistant", "yo"), ("user", "more"), ("assistant", "no")]
    spec = write_jsonl(tmp_path / "c.jsonl", [{"messages": [{"role": r, "content": c} for r, c in turns]}])
    corpus = open_eval(spec, tokenizer, DataConfig(packing="rows", max_length=200))
    (batch,) = fixed_batches(corpus.evaluation, 1)
    targets = batch.targets[batch.targets != IGNORED].tolist()
    assert tokenizer.decode(targets) == f"yo{END}no{END}"
    row = corpus.evaluation.row(0)
    assert (row == tokenizer.eos_token_id).sum() == len(turns)  # the template's own marks, and no other


def test_a_template_that_rewrites_earlier_turns_still_scores_the_answers(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(chat_template=FORGETFUL_TEMPLATE)
    turns = [("user", "hi"), ("assistant", "yo"), ("user", "more"), ("assistant", "no")]
    spec = write_jsonl(tmp_path / "c.jsonl", [{"messages": [{"role": r, "content": c} for r, c in turns]}])
    found = scored_text(tokenizer, open_eval(spec, tokenizer, DataConfig(packing="rows")).evaluation)
    assert found == "yono"


def test_an_answer_that_the_template_alters_is_not_scored_but_counted(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('=')[-1] }}")
    tokenizer = make_tokenizer(chat_template=template)
    turns = [("user", "hi"), ("assistant", "thought=yo"), ("user", "more"), ("assistant", "thought=no")]
    spec = write_jsonl(tmp_path / "c.jsonl", [{"messages": [{"role": r, "content": c} for r, c in turns]}])
    corpus = open_eval(spec, tokenizer, DataConfig(packing="rows"))
    assert scored_text(tokenizer, corpus.evaluation) == "thought=no"
    assert corpus.counters["unscored_turns"] == 1


def test_a_chat_without_template_is_written_in_lines_with_a_note(tmp_path: Path) -> None:
    spec = write_jsonl(tmp_path / "c.jsonl", [SHAPES[-1][0]])
    corpus = open_eval(spec, TOKENIZERS[False], DataConfig(packing="rows"))
    assert TOKENIZERS[False].decode(corpus.evaluation.row(0)[:-1].tolist()) == "user: hi\nassistant: yo man\n"
    assert any("no chat template" in note for note in corpus.notes)


def test_csv_parquet_json_and_jsonl_give_the_same_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    import csv

    import pyarrow as pa
    import pyarrow.parquet as pq

    long = "\u00e9" * 200_000  # above the csv module's own limit
    values = [{"prompt": f'say "{n}",\n', "completion": f"{n} is caf\u00e9 {long * (n == 3)}"} for n in range(9)]
    write_jsonl(tmp_path / "d.jsonl", values)
    (tmp_path / "d.json").write_text(json.dumps(values), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist([{**value, "extra": 1} for value in values]), tmp_path / "d.parquet")
    with (tmp_path / "d.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(values)
    limit = csv.field_size_limit()
    found = {}
    for kind in ("jsonl", "json", "parquet", "csv"):
        rows = open_eval(str(tmp_path / f"d.{kind}"), tokenizer, DataConfig(packing="rows")).evaluation
        found[kind] = [rows.row(i).tolist() for i in range(len(rows))]
    assert len(found["jsonl"]) == 9
    assert found["jsonl"] == found["json"] == found["parquet"] == found["csv"]
    assert csv.field_size_limit() == limit


def test_a_glob_is_read_in_the_order_of_its_names(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"text of {name}"}])
    rows = open_eval(str(tmp_path / "*.jsonl"), tokenizer, DataConfig(packing="rows")).evaluation
    assert [rows.sample_id(i) for i in range(3)] == ["a.jsonl:1", "b.jsonl:1", "c.jsonl:1"]


def test_text_is_parted_at_form_feeds_and_end_marks(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\npart\n\f\nsecond \x0c inside\r\n<|endoftext|>\r\nthird")
    rows = open_eval(str(path), tokenizer, DataConfig(packing="rows")).evaluation
    texts = [tokenizer.decode(rows.row(i)[:-1].tolist()) for i in range(len(rows))]
    assert texts == ["first\npart\n", "second \x0c inside\r\n", "third"]
    assert [rows.sample_id(i) for i in range(3)] == ["t.txt:1", "t.txt:4", "t.txt:6"]


@given(st.text(st.sampled_from("ab \n"), max_size=3000))
def test_pieces_joined_are_the_text_again(text: str) -> None:
    assert "".join(piece for _, piece in pieces_of(text)) == text
    assert all(piece for _, piece in pieces_of(text))


def test_a_lone_text_is_cut_up_to_hold_some_out_and_says_so(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(LINES), encoding="utf-8")
    corpus = open_data(DataConfig(train=str(path)), tokenizer)
    assert corpus.counters["train_documents"] > 1 and corpus.counters["eval_documents"] >= 1
    assert any("book.txt is one document" in note for note in corpus.notes)
    assert open_eval(str(path), tokenizer, DataConfig()).counters["eval_documents"] == 1


# -- splits ----------------------------------------------------------------------------------------------


def sides(corpus: Any, tokenizer: Any) -> tuple[Counter[str], Counter[str]]:
    def texts(rows: Rows) -> Counter[str]:
        return Counter(tokenizer.decode(rows.row(i)[:-1].tolist()) for i in range(len(rows)))

    return texts(corpus.train), texts(corpus.evaluation)


@given(
    texts=st.lists(st.sampled_from(LINES), min_size=2, max_size=40).filter(lambda texts: len(set(texts)) > 1),
    share=st.floats(0.01, 0.99),
)
@settings(deadline=None, max_examples=30)
def test_the_same_text_is_never_on_both_sides(tmp_path_factory: Any, texts: list[str], share: float) -> None:
    tokenizer = TOKENIZERS[False]
    spec = write_jsonl(tmp_path_factory.mktemp("split") / "d.jsonl", [{"text": text} for text in texts])
    config = DataConfig(train=spec, eval_share=share, packing="rows")
    train, held_out = sides(open_data(config, tokenizer), tokenizer)
    assert train and held_out
    assert not set(train) & set(held_out)
    assert train + held_out == Counter(texts)


def test_the_split_does_not_depend_on_the_order_of_records(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    values = [{"text": line} for line in LINES]
    found = []
    for name, ordered in (("a", values), ("b", values[::-1])):
        config = DataConfig(train=write_jsonl(tmp_path / f"{name}.jsonl", ordered), packing="rows")
        found.append(sides(open_data(config, tokenizer), tokenizer))
    assert found[0] == found[1]
    assert 0 < found[0][1].total() < 0.15 * len(LINES)


def test_a_smaller_train_share_is_part_of_a_larger_one(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    spec = write_jsonl(tmp_path / "d.jsonl", [{"text": line} for line in LINES])
    shares = [0.0001, 0.1, 0.5, 1.0]
    found = [
        sides(open_data(DataConfig(train=spec, train_share=share, packing="rows"), tokenizer), tokenizer)
        for share in shares
    ]
    trained = [set(train) for train, _ in found]
    assert trained[0] < trained[1] < trained[2] < trained[3]
    assert len(trained[0]) == 1 and 60 < len(trained[2]) < 130
    assert all(held_out == found[0][1] for _, held_out in found)


def test_evaluation_data_is_used_whole_and_overlap_is_told(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    train = write_jsonl(tmp_path / "t.jsonl", [{"text": line} for line in LINES[:50]])
    held_out = write_jsonl(tmp_path / "e.jsonl", [{"text": line} for line in LINES[48:60]])
    corpus = open_data(DataConfig(train=train, eval=held_out), tokenizer)
    assert (corpus.counters["train_documents"], corpus.counters["eval_documents"]) == (50, 12)
    assert corpus.counters["overlapping_records"] == 2
    assert any("2 of 12 evaluation records" in note for note in corpus.notes)


def test_counters_name_everything_that_is_promised(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    spec = write_jsonl(tmp_path / "d.jsonl", [{"text": line} for line in LINES])
    counters = open_data(DataConfig(train=spec), tokenizer).counters
    promised = "records bad_records invalid_utf8 truncated_tokens rows_without_targets train_tokens eval_tokens"
    assert {*promised.split(), "train_documents", "eval_documents"} <= set(counters)
    assert counters["records"] == counters["train_documents"] + counters["eval_documents"] == len(LINES)


# -- the embedded text -----------------------------------------------------------------------------------

SMALL_LIBRARY = {
    f"{name}.py": f'"""Module {name}, with enough words for a document.\n\n{LINES[number]}\n{LINES[9]} {LINES[8]}"""\n'
    f'def work_{number}(value=1):\n    """Do the work of {name} and return a value."""\n    return value\n'
    for number, name in enumerate(["abc", "ast", "cmd", "code", "copy", "csv", "dis", "enum", "glob", "json"])
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of a few small modules, so that a test need not tokenize ten megabytes."""
    root = tmp_path / "library"
    root.mkdir()
    for name, text in SMALL_LIBRARY.items():
        (root / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setattr(stdlib, "HELD_OUT_SHARE", 0.4)
    return root


@pytest.mark.parametrize("name", ["stdlib", "stdlib-docs", "stdlib-source", "qa"])
def test_embedded_corpora_are_filled_and_their_groups_disjoint(
    library: Path, tokenizer: PreTrainedTokenizerFast, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdlib, "topics", lambda: iter([stdlib.Document("topic:if", stdlib.TOPICS, "if " * 100)]))
    corpus = open_data(DataConfig(train=f"builtin:{name}", packing="rows"), tokenizer)
    train, held_out = set(corpus.train.groups), set(corpus.evaluation.groups)
    assert train and held_out and not train & held_out
    assert (stdlib.TOPICS in train) == (name in ("stdlib", "stdlib-docs"))
    assert all(stdlib.split_of(group) == "eval" for group in held_out)
    alone = open_eval(f"builtin:{name}", tokenizer, DataConfig(packing="rows"))
    assert alone.evaluation.groups == corpus.evaluation.groups and not len(alone.train)


def test_a_share_of_an_embedded_corpus_is_drawn_by_document_not_by_package(
    library: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [stdlib.Document(f"topic:{n}", stdlib.TOPICS, LINES[n] * 5) for n in range(40)]
    monkeypatch.setattr(stdlib, "topics", lambda: iter(pages))
    rows = open_data(DataConfig(train="builtin:stdlib", train_share=0.5, packing="rows"), tokenizer).train
    assert 5 < sum(group == stdlib.TOPICS for group in rows.groups) < 35


def test_the_library_of_this_python_has_both_sides() -> None:
    groups = {stdlib.split_of(document.group) for document in stdlib.modules()}
    assert groups == {"train", "eval"}


def test_a_stripped_library_falls_back_to_our_own_text_and_says_so(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(empty))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    for name in ("stdlib", "qa"):
        corpus = open_data(DataConfig(train=f"builtin:{name}", packing="rows"), tokenizer)
        assert len(corpus.train) and len(corpus.evaluation)
        assert not set(corpus.train.groups) & set(corpus.evaluation.groups)
        assert any("carries no text of its standard library" in note for note in corpus.notes)
