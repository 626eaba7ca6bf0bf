"""`--dry-run`: five steps, and never more than were asked for."""

from __future__ import annotations

import pytest

from stillroom.config import load, shortened
from stillroom.config.load import is_shortened


@pytest.mark.parametrize(("asked", "made"), [(0, 5), (3, 3), (5, 5), (1000, 5)])
def test_a_dry_run_never_has_more_steps_than_were_asked_for(asked: int, made: int) -> None:
    short = shortened(load(overrides={"train.max_steps": asked}))
    assert (short.config.train.max_steps, short.config.train.eval_steps) == (made, made)
    assert f"{made} steps" in short.notes[-1]


@pytest.mark.parametrize("preset", ["base", "demo", "on-policy", "sar"])
def test_the_configuration_of_a_dry_run_is_told_from_that_of_a_run(preset: str) -> None:
    whole = load(preset=preset, overrides={"train.max_steps": 5})
    assert is_shortened(shortened(whole).config) and not is_shortened(whole.config)
