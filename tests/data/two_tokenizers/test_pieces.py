"""The tokens of one vocabulary in those of another: by bytes, by role, and never by accident."""

from __future__ import annotations

import pair_tokenizers
import pytest
import tiny
from refusals import refused
from tokenizers import AddedToken

from stillroom.core.errors import ConfigError
from stillroom.data.two_tokenizers.align import pieces_of
from stillroom.data.two_tokenizers.token_bytes import TokenBytes

PAIRS = [(one, other) for one in pair_tokenizers.EXACT for other in pair_tokenizers.EXACT if one != other]


@pytest.mark.parametrize(("wanted", "held"), PAIRS)
def test_the_pieces_of_a_token_are_its_bytes(wanted: str, held: str) -> None:
    new, old = pair_tokenizers.built(wanted), pair_tokenizers.built(held)
    tables = TokenBytes.of(new), TokenBytes.of(old)
    pieces = pieces_of(new, old)
    marks = {new.bos_token_id, new.eos_token_id, new.unk_token_id}
    assert len(pieces.tokens) == len(new) and pieces.num_unspelled == 0 and pieces.num_marks == len(marks)
    for token, found in enumerate(pieces.tokens):
        if token not in marks:
            assert b"".join(tables[1].bytes_of(one) for one in found) == tables[0].bytes_of(token)
    assert pieces.num_copied + pieces.num_averaged + pieces.num_marks == len(new)
    assert pieces.num_copied > 20


def test_marks_are_matched_by_role_and_not_by_name() -> None:
    new, old = tiny.tokenizer(), pair_tokenizers.built("byte-level")  # <|end|>, <|pad|> and <unk>, <s>, </s>
    pieces = pieces_of(new, old)
    assert pieces.tokens[new.eos_token_id] == (old.eos_token_id,)
    assert pieces.tokens[new.pad_token_id] == (old.eos_token_id,), "without padding, the end mark pads"
    back = pieces_of(old, new)
    assert back.tokens[old.bos_token_id] == (new.eos_token_id,), "without a begin mark, the end mark begins"
    assert back.tokens[old.unk_token_id] == () and back.num_unspelled == 1, "no other token stands for what is unknown"


def test_a_token_is_cut_as_the_tokenizer_cuts_it_inside_of_a_text() -> None:
    new, old = pair_tokenizers.built("byte-level"), pair_tokenizers.built("BPE with bytes")
    words = {new.convert_ids_to_tokens(token): found for token, found in enumerate(pieces_of(new, old).tokens)}
    text = next(word for word, found in words.items() if len(found) > 1 and word.isascii() and word.isalpha())
    inside = old("\n" + text, add_special_tokens=False)["input_ids"]
    assert list(words[text]) == inside[-len(words[text]) :]


def test_half_a_character_is_spelled_by_bytes() -> None:
    new, old = pair_tokenizers.built("byte-level"), pair_tokenizers.built("unigram with bytes")
    table = TokenBytes.of(new)
    halves = [token for token in range(len(new)) if table.bytes_of(token) == b"\xe6"]
    (half,) = halves
    assert pieces_of(new, old).tokens[half] == (old.convert_tokens_to_ids("<0xE6>"),)


def test_a_literal_mark_of_a_template_is_cut_as_text() -> None:
    new, old = tiny.tokenizer(), pair_tokenizers.built("byte-level")
    new.add_special_tokens({"additional_special_tokens": [AddedToken("<|turn|>", special=True)]})
    pieces, table = pieces_of(new, old), TokenBytes.of(old)
    found = pieces.tokens[new.convert_tokens_to_ids("<|turn|>")]
    assert b"".join(table.bytes_of(one) for one in found) == b"<|turn|>"


def test_what_nothing_spells_has_no_pieces_and_is_counted() -> None:
    new, old = pair_tokenizers.built("byte-level"), pair_tokenizers.built("characters")
    pieces, table = pieces_of(new, old), TokenBytes.of(new)
    (control,) = (token for token in range(len(new)) if table.bytes_of(token) == b"\x01")
    assert pieces.tokens[control] == () and pieces.num_unspelled > 1


def test_a_vocabulary_that_implies_spaces_is_refused() -> None:
    both = pair_tokenizers.built("byte-level"), pair_tokenizers.built("WordPiece")
    for new, old in (both, both[::-1]):
        with refused(ConfigError, "student.vocabulary") as caught:
            pieces_of(new, old)
        assert caught.value.exit_code == 2
