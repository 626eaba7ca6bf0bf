"""Groups of tokens of two vocabularies: every id is in one, and a group says the same on both sides."""

from __future__ import annotations

import pair_tokenizers
import pytest
import tiny

from stillroom.data.two_tokenizers.align import pieces_of, token_groups
from stillroom.data.two_tokenizers.token_bytes import TokenBytes

PAIRS = [(one, other) for one in pair_tokenizers.EXACT for other in pair_tokenizers.EXACT if one < other]


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_every_group_has_a_token_on_each_side(student: str, teacher: str) -> None:
    both = pair_tokenizers.built(student), pair_tokenizers.built(teacher)
    groups = token_groups(*both)
    assert len(groups.student) == len(both[0]) and len(groups.teacher) == len(both[1])
    everyone = set(range(groups.num_groups))
    assert set(groups.student) == set(groups.teacher) == everyone and groups.num_groups > 100


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_a_token_is_grouped_with_the_first_piece_that_the_other_makes_of_it(student: str, teacher: str) -> None:
    both = pair_tokenizers.built(student), pair_tokenizers.built(teacher)
    groups = token_groups(*both)
    for own, cut in enumerate(pieces_of(*both).tokens):
        assert groups.student[own] == groups.teacher[cut[0]]
    for own, cut in enumerate(pieces_of(*both[::-1]).tokens):
        assert groups.teacher[own] == groups.student[cut[0]]


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_tokens_of_a_group_begin_with_the_same_byte(student: str, teacher: str) -> None:
    both = pair_tokenizers.built(student), pair_tokenizers.built(teacher)
    groups = token_groups(*both)
    begins: dict[int, set[bytes]] = {}
    for tokenizer, numbers in zip(both, (groups.student, groups.teacher), strict=True):
        table, marks = TokenBytes.of(tokenizer), set(tokenizer.all_special_ids)
        for token, group in enumerate(numbers):
            if token not in marks:
                begins.setdefault(group, set()).add(table.bytes_of(token)[:1])
    assert all(len(first) == 1 for first in begins.values())


def test_one_vocabulary_has_a_group_for_each_token() -> None:
    words = pair_tokenizers.built("byte-level")
    groups = token_groups(words, words)
    assert groups.student == groups.teacher == tuple(range(len(words)))


def test_tokens_that_nothing_spells_are_in_a_group_too() -> None:
    both = pair_tokenizers.built("characters"), tiny.tokenizer()
    groups = token_groups(*both)
    assert set(groups.student) == set(groups.teacher) == set(range(groups.num_groups))
