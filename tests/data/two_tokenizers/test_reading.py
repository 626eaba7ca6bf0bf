"""What is said of two tokenizers before a run."""

from __future__ import annotations

import pytest

from stillroom.data.two_tokenizers.align import Coverage
from stillroom.data.two_tokenizers.encode import shorter_notes


@pytest.mark.parametrize(("student_tokens", "is_told"), [(100, False), (150, False), (228, True)])
def test_a_student_of_much_shorter_tokens_is_told(student_tokens: int, is_told: bool) -> None:
    notes = shorter_notes(Coverage(400, 400, 60, 100, student_tokens, 110))
    assert bool(notes) is is_told
    assert all("objectives.ce alone" in note for note in notes)
