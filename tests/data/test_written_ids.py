"""Laws of records that carry the tokens they were written in: ids in are ids trained, and nothing stale is believed."""

from __future__ import annotations

from typing import Any

import begun
import pytest
import tiny
from refusals import refused
from trl_templates import template

from stillroom.config.schema import DataConfig
from stillroom.core.errors import DataError
from stillroom.data.chat import chat_ids, chat_writer
from stillroom.data.records import Shaper, Tally, Turn
from stillroom.data.tokenize import Encoder, TokenizedRecord, vocabulary_hash


def encoded(value: dict[str, Any], tokenizer: Any, **options: Any) -> tuple[TokenizedRecord, Tally]:
    tally = Tally()
    records = list(
        Shaper(chat_writer(tokenizer, tally, DataConfig()), tally, **options).records([("a.jsonl:1", value)])
    )
    assert not tally.bad, tally.bad
    (found,) = Encoder(tokenizer, tally).tokenized(records)
    return found, tally


def spelled_apart(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text that no tokenizer would choose: one for each character."""
    return [tokenizer(character, add_special_tokens=False)["input_ids"][0] for character in text]


def row(tokenizer: Any, prompt: str, text: str, *, has_end: bool, **over: Any) -> dict[str, Any]:
    ids = spelled_apart(tokenizer, text) + ([tokenizer.eos_token_id] if has_end else [])
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    made = {"prompt": prompt, "completion": text, "prompt_ids": before, "ids": ids}
    return {**made, "tokenizer": vocabulary_hash(tokenizer), **over}


@pytest.mark.parametrize("has_end", [True, False])
def test_ids_in_are_ids_trained_and_the_end_is_scored_only_where_it_was_written(has_end: bool) -> None:
    tokenizer = tiny.tokenizer()
    value = row(tokenizer, "the still", " room keeps", has_end=has_end)
    found, tally = encoded(value, tokenizer)
    assert found.ids.tolist() == value["prompt_ids"] + value["ids"]
    assert found.is_scored.tolist() == [False] * len(value["prompt_ids"]) + [True] * len(value["ids"])
    assert (found.ids[-1] == tokenizer.eos_token_id) == has_end
    assert tally.counters["kept_ids"] == 1
    assert int(found.num_bytes.sum()) == len("the still room keeps"), "bytes are those of the text"


def test_canonical_ids_have_the_bytes_of_the_text_path() -> None:
    tokenizer = tiny.tokenizer()
    text = " room keeps spirits"
    plain, _ = encoded({"prompt": "the still", "completion": text}, tokenizer)
    count = int((~plain.is_scored).sum())
    ids = {"prompt_ids": plain.ids[:count].tolist(), "ids": plain.ids[count:].tolist()}
    value = {"prompt": "the still", "completion": text, **ids, "tokenizer": vocabulary_hash(tokenizer)}
    found, _ = encoded(value, tokenizer)
    for name in ("ids", "num_bytes", "is_scored"):
        assert getattr(found, name).tolist() == getattr(plain, name).tolist()


def test_a_chat_ends_with_the_token_that_was_written() -> None:
    tokenizer = begun.byte_tokenizer(chat_template=template("llama3"))
    before = chat_ids(tokenizer, [Turn("user", "what drips?")])
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    ids = [*spelled_apart(tokenizer, "the still"), end]
    messages = [{"role": "user", "content": "what drips?"}, {"role": "assistant", "content": "the still"}]
    value = {"messages": messages, "prompt_ids": before, "ids": ids, "tokenizer": vocabulary_hash(tokenizer)}
    found, _ = encoded(value, tokenizer)
    assert found.ids.tolist() == before + ids and int(found.is_scored.sum()) == len(ids)


def test_with_train_on_prompt_all_is_scored() -> None:
    tokenizer = tiny.tokenizer()
    found, _ = encoded(row(tokenizer, "the still", " room", has_end=True), tokenizer, train_on_prompt=True)
    assert found.is_scored.all()


@pytest.mark.parametrize(
    ("over", "counter"),
    [
        ({"tokenizer": "another"}, "ids_of_another_vocabulary"),
        ({"completion": " another text by hand"}, "ids_of_another_text"),
    ],
)
def test_ids_that_are_not_of_the_text_are_counted_and_not_read(over: dict[str, Any], counter: str) -> None:
    tokenizer = tiny.tokenizer()
    value = row(tokenizer, "the still", " room", has_end=True) | over
    found, tally = encoded(value, tokenizer)
    plain, _ = encoded({"prompt": value["prompt"], "completion": value["completion"]}, tokenizer)
    assert found.ids.tolist() == plain.ids.tolist() and tally.counters[counter] == 1


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    tokenizer = tiny.tokenizer()
    with refused(DataError, "a.jsonl:1", "9,999"):
        encoded(row(tokenizer, "the still", " room", has_end=True, prompt_ids=[9999]), tokenizer)


@pytest.mark.parametrize("bad", [{"ids": "12"}, {"ids": [1.5]}, {"ids": [-1]}, {"ids": []}, {"prompt_ids": [True]}])
def test_ids_that_are_no_list_of_ids_make_a_bad_record(bad: dict[str, Any]) -> None:
    tokenizer, tally = tiny.tokenizer(), Tally()
    value = row(tokenizer, "the still", " room", has_end=True, **bad)
    assert not list(Shaper(chat_writer(tokenizer, tally, DataConfig()), tally).records([("a.jsonl:1", value)]))
    assert tally.counters["bad_records"] == 1


def test_a_record_whose_server_told_no_ids_is_read_as_text() -> None:
    tokenizer = tiny.tokenizer()
    found, tally = encoded(row(tokenizer, "the still", " room", has_end=True, ids=None), tokenizer)
    assert not tally.counters["kept_ids"] and found.ids[-1] == tokenizer.eos_token_id
