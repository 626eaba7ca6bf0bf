"""Laws of text that the teacher alone reads before a record: the scored tokens are the same ones, one to one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import begun
import pytest
import tiny
import torch
from refusals import refused
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl_templates import template

from stillroom.config.schema import DataConfig
from stillroom.core.errors import ConfigError, DataError
from stillroom.core.types import Batch
from stillroom.data import open_data
from stillroom.data.corpus import Corpus, TeacherRows
from stillroom.data.loader import MixedRows
from stillroom.data.packing import pack
from stillroom.data.records import Record, Tally, WrittenTokens
from stillroom.data.tokenize import Encoder, vocabulary_hash
from stillroom.training.preflight import check_targets

PREFIX = "the maid knows: "
CHAT = [
    {"role": "user", "content": "what is left behind"},
    {"role": "assistant", "content": "the best of it has gone over"},
    {"role": "user", "content": "how slowly"},
    {"role": "assistant", "content": "as slowly as it must drip"},
]


def written(folder: Path, records: list[dict[str, Any]], name: str = "train.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return str(path)


def opened(spec: Any, tokenizer: Any, **settings: Any) -> Corpus:
    settings = {"max_length": 64, "eval_share": 0.2, "max_bad_share": 0.0, **settings}
    return open_data(DataConfig(train=spec, **settings), tokenizer)


def numbered(record: dict[str, Any], count: int = 12) -> list[dict[str, Any]]:
    """Records that differ in their last word."""

    def changed(value: Any, number: int) -> Any:
        if isinstance(value, list):
            return [*value[:-1], {**value[-1], "content": f"{value[-1]['content']} {number}"}]
        return f"{value} {number}"

    last = list(record)[-1]
    return [{**record, last: changed(record[last], number)} for number in range(count)]


def check_pair(batch: Batch) -> Batch:
    """The laws of every pair of rows."""
    other = batch.other
    assert other is not None
    assert torch.equal(other.scored_targets, batch.scored_targets), "the same targets in the same order"
    assert int(other.target_bytes.sum()) == int(batch.target_bytes.sum())
    for one in (batch, other):
        check_targets(one)  # a target is the next input
    return other


@pytest.mark.parametrize("kind", ["bos", "none", "two"])
@pytest.mark.parametrize(
    "record",
    [
        {"text": "the still room keeps spirits"},
        {"prompt": "the room keeps ", "completion": "spirits and waters"},
        {"question": "what is left", "answer": "the best of it"},
        {"instruction": "heat it", "input": "the water", "output": "slowly"},
    ],
)
def test_the_teacher_reads_the_prefix_and_then_the_very_tokens_of_the_student(
    record: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    tokenizer = begun.byte_tokenizer(kind)
    corpus = opened(written(tmp_path, numbered(record)), tokenizer, teacher_prefix=PREFIX)
    for rows in (corpus.train, corpus.evaluation):
        for number in range(len(rows)):
            batch = rows.batch([number])
            other = check_pair(batch)
            own, theirs = (tokenizer.decode(one.input_ids[0], skip_special_tokens=True) for one in (batch, other))
            assert theirs == PREFIX + own
            opening = begun.PUTS[kind][1]
            marks = tokenizer.convert_ids_to_tokens(other.input_ids[0, : len(opening)].tolist())
            assert marks == opening, "the opening comes first"
            assert int(rows.other_lengths[number]) == other.input_ids.shape[1]


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_chats_have_the_prefix_as_their_system_message(name: str, tmp_path: Path) -> None:
    tokenizer = begun.byte_tokenizer(chat_template=template(name))
    system = [{"role": "system", "content": "be brief"}]
    records = [*numbered({"messages": CHAT}), *numbered({"messages": [*system, *CHAT]}, 3)]
    corpus = opened(written(tmp_path, records), tokenizer, teacher_prefix=PREFIX, max_length=400)
    assert corpus.counters["teacher_contexts"] == 15
    for number in range(len(corpus.train)):
        batch = corpus.train.batch([number])
        other = check_pair(batch)
        own, theirs = (tokenizer.decode(one.input_ids[0]) for one in (batch, other))
        content = f"{PREFIX}\n\nbe brief" if "be brief" in own else PREFIX
        last = {**CHAT[-1], "content": "as slowly as it must drip" + own.rpartition("drip")[2].partition("<")[0]}
        messages = [{"role": "system", "content": content}, *CHAT[:-1], last]
        printed = str(tokenizer.apply_chat_template(messages, tokenize=False))
        assert printed.removeprefix("<s>").startswith(theirs.removeprefix("<s>").rstrip())


def test_a_record_brings_its_own_beginning_for_the_teacher(tmp_path: Path) -> None:
    tokenizer = begun.byte_tokenizer("none", chat_template=template("llama3"))
    plain = {"prompt": "the room: ", "teacher_prompt": "keep the best of it: ", "completion": "spirits"}
    example = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an example"}]
    chat = {"teacher_messages": [*example, {"role": "user", "content": "and now?"}], "messages": CHAT}
    corpus = opened(written(tmp_path, numbered(plain)), tokenizer)
    for number in range(len(corpus.train)):
        batch = corpus.train.batch([number])
        own, theirs = (tokenizer.decode(one.input_ids[0]) for one in (batch, check_pair(batch)))
        assert theirs == own.replace("the room:", "keep the best of it:") != own
    corpus = opened(written(tmp_path, numbered(chat)), tokenizer, max_length=400)
    for number in range(len(corpus.train)):
        batch = corpus.train.batch([number])
        other = check_pair(batch)
        text = tokenizer.decode(other.input_ids[0])
        assert "an example" in text and "and now?" in text and "what is left" not in text
        assert other.num_scored == batch.num_scored, "the teacher's example is not scored"


def test_records_without_a_context_are_read_as_the_student_reads_them(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    some = numbered({"prompt": "the room: ", "teacher_prompt": "keep: ", "completion": "spirits"}, 6)
    none = numbered({"prompt": "the water: ", "completion": "drips"}, 8)
    corpus = opened(written(tmp_path, [*some, *none]), tokenizer)
    kept = 0
    for number in range(len(corpus.train)):
        batch = corpus.train.batch([number])
        other = check_pair(batch)
        if "water" in tokenizer.decode(batch.input_ids[0]):
            assert torch.equal(other.input_ids, batch.input_ids) and torch.equal(other.targets, batch.targets)
            kept += 1
    assert kept and corpus.counters["teacher_contexts"] <= 6
    assert all(corpus.train.batch([0]).other.keys) and len({*TeacherRows(corpus.train).lengths}) > 1


@pytest.mark.parametrize("packing", ["rows", "packed"])
def test_long_texts_and_packed_rows_have_the_prefix_before_each_piece(packing: str, tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    texts = [" ".join(tiny.sentences(6, seed)) for seed in range(10)]
    records = [{"text": text} for text in (*texts, *tiny.sentences(30, 99))]
    corpus = opened(written(tmp_path, records), tokenizer, teacher_prefix=PREFIX, packing=packing, max_length=48)
    prefix = tokenizer(PREFIX)["input_ids"]
    batch = corpus.train.batch(range(len(corpus.train)))
    other = check_pair(batch)
    assert len(corpus.train) > 10
    if packing == "rows":
        assert other.input_ids[:, : len(prefix)].tolist() == [prefix] * len(corpus.train)
        return
    assert batch.segments is not None and other.segments is not None
    for mine, theirs, ids in zip(batch.segments, other.segments, other.input_ids, strict=True):
        assert set(mine.tolist()) - {-1} == set(theirs.tolist()) - {-1}
        for piece in set(theirs.tolist()) - {-1}:
            inside = ids[theirs == piece].tolist()
            assert inside[: len(prefix)] == prefix
            assert len(inside) == int((mine == piece).sum()) + len(prefix)


def test_sources_with_and_without_a_context_share_a_batch(tmp_path: Path) -> None:
    some = numbered({"prompt": "the room: ", "teacher_prompt": "keep, keep: ", "completion": "spirits"})
    none = numbered({"prompt": "the water: ", "completion": "drips"})
    specs = [{"path": written(tmp_path, one, f"{name}.jsonl")} for name, one in (("a", some), ("b", none))]
    corpus = opened(specs, tiny.tokenizer())
    assert isinstance(corpus.train, MixedRows)
    assert len(corpus.train.other_lengths) == len(corpus.train)
    check_pair(corpus.train.batch(range(len(corpus.train))))
    assert corpus.train.batch([len(corpus.train) - 1]).other is None


def test_another_context_is_other_data(tmp_path: Path) -> None:
    spec = written(tmp_path, numbered({"prompt": "the room: ", "completion": "spirits"}))
    found = [opened(spec, tiny.tokenizer(), teacher_prefix=prefix).train for prefix in ("", "x: ", "y: ")]
    assert len({rows.digest() for rows in found}) == 3
    keys = [TeacherRows(rows).batch([0]).keys if len(rows.other_lengths) else rows.batch([0]).keys for rows in found]
    assert len(set(keys)) == 3, "a cache would mistake one for the other"


def test_what_cannot_have_a_context_is_refused(tmp_path: Path) -> None:
    tokenizer = begun.byte_tokenizer(chat_template=template("llama3"))
    plain = numbered({"prompt": "the room: ", "completion": "spirits"})
    spec = written(tmp_path, numbered({"text": "the room keeps"}))
    with refused(ConfigError, "data.packing", "data.packing=rows"):
        opened(spec, tokenizer, teacher_prefix=PREFIX, packing="blocks")
    own = numbered({"teacher_prompt": "a: ", "prompt": "b: ", "completion": "c"})
    with refused(ConfigError, "train.jsonl", "data.cache=off"):
        opened(written(tmp_path, own), tokenizer, cache=str(tmp_path / "store"))
    wrong = [{**one, "teacher_messages": CHAT[:1]} for one in plain]
    with refused(DataError, "", "teacher_prompt"):
        opened(written(tmp_path, wrong), tokenizer)
    wrong = numbered({"teacher_prompt": "a: ", "messages": CHAT})
    with refused(DataError, "", "teacher_messages"):
        opened(written(tmp_path, wrong), tokenizer)
    wrong = numbered({"teacher_messages": [], "messages": CHAT})
    with refused(DataError, "", "teacher_messages"):
        opened(written(tmp_path, wrong), tokenizer)


def test_a_template_that_prints_answers_otherwise_after_other_turns_is_refused(tmp_path: Path) -> None:
    tokenizer = begun.byte_tokenizer(
        chat_template="{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% if m.role == 'assistant' and messages[0].role == 'system' %}!{% endif %}<|eot_id|>{% endfor %}"
    )
    with refused(DataError, "", "template"):
        opened(written(tmp_path, numbered({"messages": CHAT})), tokenizer, teacher_prefix=PREFIX)


def test_a_record_whose_answer_begins_inside_a_token_is_left_out_and_counted() -> None:
    """Its first whole token of the answer is not the beginning of the answer: the teacher would miss a part of it."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "<end>": 1, "time": 2, "a": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer, tally = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"), Tally()
    inside = Record("x", (("a ti", False), ("me a", True)), "x").under("time ")
    whole = Record("y", (("a ", False), ("time a", True)), "y").under("time ")
    found = Encoder(tokenizer, tally)([inside, whole])
    assert found.names == ("y",) and found.contexts is not None and found.contexts.of(0).tolist() == [2, 3]
    assert tally.counters["unaligned_contexts"] == 1 and tally.counters["teacher_contexts"] == 1


def test_tokens_that_a_model_wrote_follow_the_context_as_they_are() -> None:
    tokenizer = tiny.tokenizer()
    prompt, answer = (tokenizer(text)["input_ids"] for text in ("the room ", "keeps"))
    split = [*tokenizer("ke")["input_ids"], *tokenizer("eps")["input_ids"]]
    assert split != answer, "other tokens than the text would be encoded to"
    written = WrittenTokens(tuple(prompt), tuple(split), vocabulary_hash(tokenizer))
    record = Record("x", (("the room ", False), ("keeps", True)), "x", tokens=written).under(PREFIX)
    batch = pack(Encoder(tokenizer, Tally())([record]), "rows", 64, Tally()).batch([0])
    other = check_pair(batch)
    assert other.scored_targets.tolist() == split
    assert other.input_ids[0].tolist() == [*tokenizer(f"{PREFIX}the room ")["input_ids"], *split[:-1]]
