"""Laws of the letters that pictures are written with."""

from __future__ import annotations

import string

import pytest

from stillroom.report.lettering import strokes_of, width_of


@pytest.mark.parametrize("letter", string.ascii_letters + string.digits + ".,:;-_+=/|<>()%'\"!?")
def test_every_letter_has_a_shape_of_its_own_inside_its_width(letter: str) -> None:
    strokes = strokes_of(letter)
    assert strokes and strokes != strokes_of("\u4e2d")
    for x, y in (point for stroke in strokes for point in stroke):
        assert -0.6 <= x <= width_of(letter, 14.0) + 1.0 and -3.5 <= y <= 10.6
    others = [other for other in string.ascii_letters + string.digits if other != letter]
    assert all(strokes_of(other) != strokes for other in others)


def test_a_letter_that_is_not_known_is_a_box_and_a_space_is_nothing() -> None:
    assert len(strokes_of("\u4e2d")) == 1 and strokes_of(" ") == ()
    assert width_of("", 14.0) == 0.0 and width_of("ab", 28.0) == 2 * width_of("ab", 14.0)
