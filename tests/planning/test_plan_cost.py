"""Arithmetic and time of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stillroom.config import load_config
from stillroom.planning.cost import Cost, cost_of, forward_flops
from stillroom.planning.parts import lay_out
from stillroom.planning.shapes import Shapes
from stillroom.planning.target import find_target

COST = Cost(100, 1000, 10, 4.0, 6.0, 3.0, None, "", 48.0)


def test_a_cache_pays_from_the_second_pass_on() -> None:
    assert replace(COST, passes=1.0).cached_over_live == pytest.approx(1.0)
    assert COST.cached_over_live == pytest.approx((6 + 4 * 3) / (4 * 9))


def test_a_named_card_gives_a_time_that_is_called_a_model() -> None:
    config = load_config(overrides={"train.max_steps": 10})
    target = find_target(card="T4")
    layout = lay_out(config, Shapes(target), "fp16-mixed")
    cost = cost_of(config, layout, teacher=layout.teacher, card=target.card)
    assert cost.seconds_from.startswith("a model")
    assert cost.seconds_per_step == pytest.approx(
        cost.tokens_per_step * (cost.teacher_flops_per_token + cost.student_flops_per_token) / 65e12
    )
    assert layout.teacher is not None
    assert cost.student_flops_per_token == 3 * forward_flops(layout.sizes, config.data.max_length)
    assert cost.ratio == cost.teacher_flops_per_token / cost.student_flops_per_token
