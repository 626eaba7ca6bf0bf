"""Laws of a figure as plain shapes: inside the surface, at round ticks, with its intervals."""

from __future__ import annotations

import pytest

from stillroom.report import RunRecord
from stillroom.report.figures import perplexity
from stillroom.report.history import History
from stillroom.report.picture import BOTTOM, HEIGHT, TOP, WIDTH, Dot, Stroke, Words, round_ticks, shapes


def drawn(*values: float, interval: tuple[float, float] | None = None) -> list[object]:
    evals = [{"event": "eval", "step": 10 * step, "perplexity": value} for step, value in enumerate(values)]
    for event in evals:
        event |= {"intervals": {"perplexity": list(interval)}} if interval else {}
    figure = perplexity(RunRecord("run", history=History.of(evals)))
    assert figure is not None
    return list(shapes(figure))


@pytest.mark.parametrize("values", [(9.0, 8.0), (2031.0, 57.1, 20.0), (3.0,), (5.0, 5.0), (1e30, 1.0)])
def test_everything_is_inside_the_surface(values: tuple[float, ...]) -> None:
    for shape in drawn(*values):
        points = shape.points if isinstance(shape, Stroke) else [(shape.x, shape.y)]  # type: ignore[attr-defined]
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert any(isinstance(shape, Dot) for shape in drawn(*values))


def test_an_interval_is_drawn_from_end_to_end_and_inside_the_axes() -> None:
    plain, whiskers = drawn(9.0, 8.0), drawn(9.0, 8.0, interval=(8.4, 8.6))
    assert len(whiskers) == len(plain) + 6
    for shape in drawn(9.0, 8.0, interval=(-1.0, 400.0)):
        if isinstance(shape, Stroke):
            assert all(y <= HEIGHT - BOTTOM and (y >= TOP or y == 58) for _x, y in shape.points)  # 58: the legend


def test_the_axes_are_named() -> None:
    said = [shape.text for shape in drawn(9.0, 8.0) if isinstance(shape, Words)]
    assert "optimizer step" in said and "perplexity" in said and "student" in said


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 1500.0), (57.1, 57.3), (-3.0, 4e6)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = round_ticks(low, high)
    assert 3 <= len(ticks) <= 12 and low <= ticks[0] and ticks[-1] <= high
    assert all(float(f"{tick:.5g}") == pytest.approx(tick) for tick in ticks)
