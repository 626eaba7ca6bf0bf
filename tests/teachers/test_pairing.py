"""Which tokens two vocabularies have in common."""

from __future__ import annotations

import pair_tokenizers
import pytest

from stillroom.data.two_tokenizers.token_bytes import TokenBytes
from stillroom.teachers.paired import matched_tokens


@pytest.mark.parametrize("pair", [("byte-level", "BPE with bytes"), ("characters", "unigram with bytes")])
def test_matched_tokens_stand_for_the_same_bytes_and_none_is_matched_twice(pair: tuple[str, str]) -> None:
    both = [pair_tokenizers.built(name) for name in pair]
    tables = [TokenBytes.of(tokenizer) for tokenizer in both]
    matched = matched_tokens(*both)
    for ids in (matched.student_ids, matched.teacher_ids):
        assert len(set(ids)) == len(ids) > 20
    pairs = list(zip(matched.student_ids, matched.teacher_ids, strict=True))
    ends = (both[0].eos_token_id, both[1].eos_token_id)
    assert ends in pairs
    for ours, theirs in pairs:
        assert (ours, theirs) == ends or tables[0].bytes_of(ours) == tables[1].bytes_of(theirs)


def test_a_vocabulary_matches_itself_whole() -> None:
    tokenizer = pair_tokenizers.built("unigram with bytes")
    matched = matched_tokens(tokenizer, tokenizer)
    assert list(matched.student_ids) == list(matched.teacher_ids) == list(range(len(tokenizer)))
    assert matched.student_rest == matched.teacher_rest == 0 and not matched.problem


def test_of_a_character_and_its_byte_the_character_is_matched() -> None:
    student, teacher = pair_tokenizers.built("byte-level"), pair_tokenizers.built("unigram with bytes")
    found = matched_tokens(student, teacher)
    matched = dict(zip(found.student_ids, found.teacher_ids, strict=True))
    letter = student.convert_tokens_to_ids("t")
    assert teacher.convert_ids_to_tokens(matched[letter]) == "t"


def test_tokens_that_imply_spaces_are_not_matched() -> None:
    assert matched_tokens(pair_tokenizers.built("byte-level"), pair_tokenizers.built("WordPiece")).problem
