"""Two runs side by side: only what differs, and results with intervals."""

from __future__ import annotations

from typing import Any

import pytest

from stillroom.doctor.diagnose import compare, compare_lines
from stillroom.telemetry.record import LoggedRun


def record(name: str, perplexity: float, spread: float, rate: float, tokens: int = 90) -> LoggedRun:
    row: dict[str, Any] = {
        "perplexity": perplexity,
        "intervals": {"perplexity": [perplexity - spread, perplexity + spread]},
    }
    start = {"event": "run_start", "data": {"eval_tokens": tokens, "eval_documents": 9}, "versions": {"torch": "2"}}
    config = {"train": {"learning_rate": rate, "seed": 0}}
    return LoggedRun(name, config, (start,), {"status": "done", "steps": 10, "student": row})


def test_only_the_settings_that_differ_are_listed() -> None:
    found = compare(record("a", 10.0, 1.0, 1e-3), record("b", 10.0, 1.0, 1e-4))
    assert found["settings"] == {"train.learning_rate": [1e-3, 1e-4]} and not found["surroundings"]


@pytest.mark.parametrize(
    ("second", "spread", "verdict"),
    [(10.0, 1.0, "equal"), (9.0, 1.0, "intervals overlap"), (5.0, 1.0, "second better"), (15.0, 1.0, "first better")],
)
def test_a_difference_counts_only_where_the_intervals_are_apart(second: float, spread: float, verdict: str) -> None:
    found = compare(record("a", 10.0, spread, 1e-3), record("b", second, spread, 1e-3))
    assert found["results"]["student"]["perplexity"]["verdict"] == verdict


def test_results_on_different_held_out_text_are_not_judged() -> None:
    found = compare(record("a", 10.0, 1.0, 1e-3), record("b", 5.0, 1.0, 1e-3, tokens=70))
    assert found["held_out_alike"] is False and found["results"]["student"]["perplexity"]["verdict"] == "unknown"
    assert any("cannot be compared" in line for line in compare_lines(found))


def test_lines_fit_eighty_columns_and_runs_without_results_say_so() -> None:
    lines = compare_lines(compare(record("a", 1234.5, 100.0, 1e-3), record("b", 5.0, 1.0, 1e-4)))
    assert all(len(line) <= 80 for line in lines) and any("second better" in line for line in lines)
    assert any("neither run has one" in line for line in compare_lines(compare(LoggedRun("a"), LoggedRun("b"))))
