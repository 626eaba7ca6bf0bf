"""Spans of two tokenizers: every byte covered once on both sides or left out, over random Unicode."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pair_tokenizers
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from refusals import refused

from stillroom.core.errors import ConfigError, DataError
from stillroom.data.two_tokenizers.align import Placed, Spans, common_spans, coverage_of, place_tokens
from stillroom.data.two_tokenizers.token_bytes import TokenBytes

NAMES = tuple(pair_tokenizers.BUILDERS)
PIECES = (
    "the still room", " keeps", "Spirits", "def f(x):\n    return x\n", "\t\t", "   ", "\n\n", "\r\n", " ",
    "e\u0301", "caf\u00e9", "\ufb01ne", "\u2460", "\uff21\uff22", "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1e9\U0001f1ea", "\u65e5\u672c\u8a9e", "\u65e5 \u672c", "\u0645\u0631\u062d", "\u05e9\u05dc\u05d5",
    "\u0000", "\u0007", "\u2581", "\u00a0", "\u3000", "\u200b", "\ufeff", "don't", "a,b", "a , b", "0.1 e", "</s>",
    "<0x41>", "##ing", "\u0130", "\u1e9e",
)  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=12).map("".join)


@cache
def table(name: str) -> TokenBytes:
    return TokenBytes.of(pair_tokenizers.built(name))


def placed(name: str, text: str) -> tuple[Placed, np.ndarray[Any, Any]]:
    answer = pair_tokenizers.built(name)(
        [text], add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True
    )
    ids = np.array(answer["input_ids"][0], np.int64)
    offsets = np.array(answer["offset_mapping"][0], np.int64).reshape(-1, 2)
    return place_tokens(text, ids, (offsets[:, 0], offsets[:, 1]), table(name)), ids


def spans_of(one: str, other: str, text: str) -> Spans:
    return common_spans(placed(one, text)[0], placed(other, text)[0], len(text.encode()))


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, pair=st.sampled_from([*itertools.combinations(NAMES, 2), *((name, name) for name in NAMES)]))
@example(text="...\U0001f600 \u65e5\u672c", pair=("byte-level", "BPE with bytes"))
@example(text="\ufb01ne", pair=("BPE with bytes", "unigram NFKC"))
@example(text="e\u0301a", pair=("byte-level", "byte-level NFC"))
def test_every_byte_is_covered_once_on_both_sides_or_left_out(text: str, pair: tuple[str, str]) -> None:
    whole = text.encode()
    sides = [placed(name, text) for name in pair]
    spans = common_spans(sides[0][0], sides[1][0], len(whole))
    numbers = ((spans.student_firsts, spans.student_ends), (spans.teacher_firsts, spans.teacher_ends))
    for (firsts, ends), (where, ids), name in zip(numbers, sides, pair, strict=True):
        assert (ends > firsts).all() and (firsts[1:] >= ends[:-1]).all(), "no token is in two spans"
        spelled = table(name)
        for place, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
            begin, stop = int(where.starts[first]), int(where.ends[end - 1])
            assert stop - begin == spans.sizes[place], "both sides of a span have the same bytes"
            assert where.is_sure[first:end].all()
            assert (where.starts[first + 1 : end] == where.ends[first : end - 1]).all(), "without gaps"
            own = b"".join(spelled.bytes_of(token) for token in ids[first:end].tolist())
            text_bytes = whole[begin:stop]
            if spelled.implies_spaces:
                assert own.replace(b" ", b"") == text_bytes.replace(b" ", b"")
            else:
                assert own in (text_bytes, b" " + text_bytes), "a span's tokens spell its bytes"
            if spans.is_exact[place]:
                assert own == text_bytes
    begins = [side[0].starts[firsts] for (firsts, _), side in zip(numbers, sides, strict=True)]
    assert (begins[0] == begins[1]).all(), "boundaries are common"
    coverage = coverage_of(spans, len(whole))
    assert coverage.in_spans + coverage.left_out == len(whole) and coverage.left_out >= 0


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, pair=st.sampled_from([*itertools.combinations_with_replacement(pair_tokenizers.EXACT, 2)]))
def test_tokenizers_that_keep_every_byte_cover_every_byte(text: str, pair: tuple[str, str]) -> None:
    assume("\u2581" not in text and "<0x" not in text)  # SentencePiece reads these as a space and as a byte
    assert coverage_of(spans_of(*pair, text), len(text.encode())).left_out == 0


@pytest.mark.parametrize("name", pair_tokenizers.EXACT)
def test_a_tokenizer_beside_itself_has_one_span_for_each_token(name: str) -> None:
    text = "the still room keeps caf\u00e9 \U0001f600"
    spans = spans_of(name, name, text)
    _, ids = placed(name, text)
    assert len(spans) == len(ids) == int(spans.student_ends[-1])
    assert (spans.student_firsts == spans.teacher_firsts).all()


def test_a_changed_letter_is_left_out_and_its_neighbours_are_not() -> None:
    text = "the Room keeps"
    spans = spans_of("byte-level", "byte-level lower case", text)
    where = placed("byte-level", text)[0]
    bounds = zip(spans.student_firsts, spans.student_ends, strict=True)
    covered = "".join(text[where.starts[first] : where.ends[end - 1]] for first, end in bounds)
    assert covered.startswith("the") and covered.endswith(" keeps") and "R" not in covered
    assert 1 <= coverage_of(spans, len(text)).left_out <= 6


def test_a_space_is_implied_between_words_and_not_beside_punctuation() -> None:
    assert table("WordPiece").implies_spaces
    assert coverage_of(spans_of("byte-level", "WordPiece", "the still room"), 14).left_out == 0
    assert coverage_of(spans_of("byte-level", "WordPiece", "the  still"), 10).left_out > 0
    assert coverage_of(spans_of("byte-level", "WordPiece", "the , still"), 11).left_out > 0


def test_white_space_that_is_lost_is_left_out_and_nothing_is_shifted() -> None:
    tokenizer = pair_tokenizers.spaceless()
    text = "the room"
    answer = tokenizer([text], add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.array(answer["offset_mapping"][0], np.int64)
    own = TokenBytes.of(tokenizer)
    assert not own.implies_spaces
    teacher = place_tokens(text, np.array(answer["input_ids"][0], np.int64), (offsets[:, 0], offsets[:, 1]), own)
    spans = common_spans(placed("characters", text)[0], teacher, len(text))
    assert len(spans) == 7 and coverage_of(spans, len(text)).left_out == 1


def test_half_of_a_surrogate_pair_is_refused() -> None:
    nothing = np.zeros(1, np.int64)
    with pytest.raises(DataError, match="surrogate"):
        place_tokens("a\ud800", nothing, (nothing, nothing), table("byte-level"))


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast, name_or_path = False, "slow"

    with refused(ConfigError, "teacher.model", "slow") as caught:
        TokenBytes.of(Slow(), "teacher")
    assert caught.value.exit_code == 2


def test_an_end_mark_outside_of_the_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = pair_tokenizers.byte_level()
    monkeypatch.setattr(tokenizer, "get_vocab", lambda: {"a": 0})
    with refused(ConfigError, "teacher.model", "bos_token", "<s>"):
        TokenBytes.of(tokenizer, "teacher")
