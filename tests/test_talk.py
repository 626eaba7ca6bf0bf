"""Laws of conversations: the history is the template's own, seeds repeat, a turn ends where the template ends it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import begun
import families
import pytest
from trl_templates import template

from stillroom import talk
from stillroom.data.prompts import chat_ids, turn_end_ids
from stillroom.data.records import Turn
from stillroom.errors import ConfigError
from stillroom.models.generate import Piece
from stillroom.talk import Conversation, Writer, until


@pytest.fixture
def chatty() -> Writer:
    return Writer(families.build("llama"), begun.byte_tokenizer(chat_template=template("llama3")))


def test_the_history_is_what_the_template_prints(chatty: Writer) -> None:
    talked = Conversation(chatty, system="be brief")
    asked: list[list[int]] = []
    write = chatty.write
    object.__setattr__(chatty, "write", lambda ids, **options: asked.extend(ids) or write(ids, **options))
    first = "".join(talked.ask("the still", max_new_tokens=6))
    "".join(talked.ask("and the room", max_new_tokens=6))
    turns = [("system", "be brief"), ("user", "the still"), ("assistant", first.strip()), ("user", "and the room")]
    messages = [{"role": role, "content": content} for role, content in turns]
    wanted = chatty.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert asked[1] == wanted
    talked.reset()
    "".join(talked.ask("and the room", max_new_tokens=6))
    assert asked[2] == chatty.tokenizer.apply_chat_template(
        [messages[0], messages[-1]], add_generation_prompt=True, return_dict=True
    )["input_ids"]  # fmt: skip


def test_the_same_seed_is_the_same_conversation(chatty: Writer) -> None:
    def told(seed: int) -> list[str]:
        talked = Conversation(chatty)
        options = {"max_new_tokens": 12, "temperature": 1.5, "seed": seed}
        return ["".join(talked.ask(question, **options)) for question in ("the", "the", "room")]

    assert told(3) == told(3) != told(4)


def test_an_answer_that_is_left_is_kept_as_far_as_it_was_read(chatty: Writer) -> None:
    talked = Conversation(chatty)
    pieces = talked.ask("the still", max_new_tokens=20)
    read = next(piece for piece in pieces if piece.strip())
    pieces.close()  # as Ctrl-C would
    assert [turn.role for turn in talked.turns] == ["user", "assistant"]
    assert talked.turns[1].content == read.strip() and not chatty.network.training


@pytest.mark.parametrize(("name", "mark"), [("llama3", "<|eot_id|>"), ("none", None)])
def test_the_end_of_a_turn_is_found_in_the_template(name: str, mark: str | None) -> None:
    tokenizer = begun.byte_tokenizer(chat_template=template("llama3") if name == "llama3" else None)
    assert turn_end_ids(tokenizer) == ({tokenizer.convert_tokens_to_ids(mark)} if mark else set())
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    assert turn_end_ids(tokenizer) == set()  # a line break is no special token
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert turn_end_ids(tokenizer) == set()


def test_without_a_template_turns_are_lines_and_the_model_does_not_ask_itself(monkeypatch: Any) -> None:
    tokenizer = begun.byte_tokenizer()
    writer = Writer(families.build("llama"), tokenizer)
    ids = chat_ids(tokenizer, [Turn("user", "the"), Turn("assistant", "room"), Turn("user", "still")])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user: the\nassistant: room\nuser: still\nassistant:"

    def write(*_: Any, **__: Any) -> Iterator[Piece]:
        for text in (" well\nus", "e it\nuse", "r: and", " more"):
            yield Piece(0, text)

    monkeypatch.setattr(talk, "stream", write)
    talked = Conversation(writer)
    assert "".join(talked.ask("the")) == "well\nuse it" and talked.ended == "end of text"


@pytest.mark.parametrize("pieces", [["abc", "def"], ["a", "b", "c", "d"], ["abc<", "stop"], [], ["a<st", "o"]])
def test_text_without_the_mark_is_given_whole(pieces: list[str]) -> None:
    assert "".join(text for text, _is_over in until(iter(pieces), "<stop>")) == "".join(pieces)


def test_text_ends_at_a_mark_in_any_pieces() -> None:
    whole = "ab<<stop>cd"
    for first in range(len(whole)):
        for second in range(first, len(whole)):
            pieces = [whole[:first], whole[first:second], whole[second:]]
            assert "".join(text for text, _is_over in until(iter(pieces), "<stop>")) == "ab<"


def test_a_template_that_refuses_the_conversation_is_explained() -> None:
    tokenizer = begun.byte_tokenizer(chat_template="{{ raise_exception('no system here') }}")
    with pytest.raises(ConfigError, match="refuses the conversation: no system here"):
        chat_ids(tokenizer, [Turn("user", "a")])
