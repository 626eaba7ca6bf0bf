"""Laws of text in pieces: joined they are the whole, with its spaces, and no character is broken."""

from __future__ import annotations

import random
from typing import Any

import begun
import families
import pytest

from stillroom.models.generate import continuation, generate, stream
from stillroom.models.text_stream import TextStream

TOKENIZERS = {"byte": begun.byte_tokenizer, "llama": begun.llama_tokenizer}
TEXT = "the still room \u00e9t\u00e9 \u20ac \U0001f600 keeps  spirits, and waters"


def pieces(tokenizer: Any, before: list[int], after: list[int]) -> list[str]:
    text = TextStream(tokenizer, before)
    return [*(text.add(token) for token in after), text.rest()]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_pieces_joined_are_the_whole(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer(TEXT)["input_ids"]
    for place in range(1, len(ids)):
        assert "".join(pieces(tokenizer, ids[:place], ids[place:])) == continuation(tokenizer, ids[:place], ids[place:])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_pieces_of_any_tokens_joined_are_the_whole(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    rng = random.Random(0)
    for _ in range(40):
        ids = [rng.randrange(len(tokenizer)) for _ in range(40)]
        place = rng.randrange(1, 30)
        assert "".join(pieces(tokenizer, ids[:place], ids[place:])) == continuation(tokenizer, ids[:place], ids[place:])


def test_a_character_split_over_tokens_is_held_back_until_it_is_whole() -> None:
    tokenizer = begun.byte_tokenizer()
    ids = tokenizer("a\u20acb", add_special_tokens=False)["input_ids"]
    assert len(ids) == 5
    assert pieces(tokenizer, ids[:1], ids[1:]) == ["", "", "\u20ac", "b", ""]
    assert pieces(tokenizer, ids[:1], ids[1:3]) == ["", "", "\ufffd"]


def test_the_first_piece_after_special_tokens_keeps_its_space() -> None:
    tokenizer = begun.llama_tokenizer()
    ids = tokenizer("the still room")["input_ids"]
    prompt = [*ids[:2], *[2] * 20]  # a template may end in many special tokens
    assert "".join(pieces(tokenizer, prompt, ids[2:])) == continuation(tokenizer, prompt, ids[2:]) == " still room"


def test_what_is_streamed_is_what_is_generated() -> None:
    tokenizer, model = begun.byte_tokenizer(), families.build("llama")
    options = {"max_new_tokens": 30, "temperature": 1.5, "seed": 5}
    texts = ["the still", "how slowly it must drip", ""]
    streamed = [""] * 3
    for piece in stream(model, tokenizer, texts, **options):
        streamed[piece.row] += piece.text
        assert piece.ended or not piece.text.endswith("\ufffd")
    assert streamed == [generate(model, tokenizer, text, **options) for text in texts]
    assert len(set(streamed)) == 3
