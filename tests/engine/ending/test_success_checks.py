"""Laws of the success criteria: each check can fail, and fails for its own reason only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from stillroom.config import load_config
from stillroom.engine.distill import distill
from stillroom.engine.ending.success_checks import check_gap, check_perplexity, success_checks
from stillroom.types import TermRecord

BOUNDS: dict[str, Any] = {
    "perplexity": 30.0,
    "perplexity_before": 300.0,
    "max_perplexity": 0.0,
    "min_share": 0.01,
    "epoch_steps": 10,
}


def step(number: int, **over: Any) -> dict[str, Any]:
    weights = over.pop("weights", {"kd": 0.7, "ce": 0.3})
    means = over.pop("means", dict.fromkeys(weights, 2.0))
    terms = {name: vars(term) for name, term in TermRecord.table(means, weights).items()}
    record = {"event": "step", "step": number, "verdict": "keep", "train_loss": 2.0, "grad_norm": 1.0, "phase": "a"}
    return {**record, "terms": terms, **over}


def evaluation(number: int, objective: float | None = 2.2) -> dict[str, Any]:
    return {"event": "eval", "step": number, "objective": objective}


def judged(events: list[dict[str, Any]], **over: Any) -> dict[str, dict[str, Any]]:
    found = success_checks(events, **{**BOUNDS, **over})
    for check in found:
        assert set(check) == {"name", "passed", "value", "bound", "text"}
    return dict(zip(("perplexity", "gap", "finite", "balance"), found, strict=True))


def good_run() -> list[dict[str, Any]]:
    return [*(step(number) for number in range(1, 31)), evaluation(30)]


def failed(events: list[dict[str, Any]], **over: Any) -> set[str]:
    return {name for name, check in judged(events, **over).items() if not check["passed"]}


def test_a_good_run_passes_all_four() -> None:
    assert failed(good_run()) == set()


def test_perplexity_is_held_against_the_bound_or_the_untrained_student() -> None:
    assert failed(good_run(), perplexity=301.0) == {"perplexity"}
    assert failed(good_run(), max_perplexity=20.0) == {"perplexity"}
    assert failed(good_run(), max_perplexity=31.0, perplexity_before=None) == set()
    assert failed(good_run(), perplexity=float("nan")) == {"perplexity"}
    assert failed(good_run(), perplexity_before=None) == {"perplexity"}


def test_a_student_that_is_worse_than_a_guess_fails_whatever_it_was_before() -> None:
    """An untrained student may be worse than chance; to be better than it is no success."""
    assert failed(good_run(), perplexity=1e17, perplexity_before=1e19) == set()  # without a vocabulary nothing is known
    for over in ({}, {"max_perplexity": 1e18}):
        found = judged(good_run(), perplexity=1e17, perplexity_before=1e19, vocab_size=32_000, **over)["perplexity"]
        assert not found["passed"] and "a guess among all 32,000 tokens has 32,000" in found["text"]
    assert failed(good_run(), vocab_size=30) == {"perplexity"}
    assert failed(good_run(), vocab_size=31) == set()


def test_the_guides_gap_of_six_fails_and_says_so() -> None:
    events = [*(step(number, train_loss=15.5) for number in range(1, 31)), evaluation(30, 95.86)]
    check = judged(events)["gap"]
    assert not check["passed"] and check["value"] == pytest.approx(6.18, abs=0.01) and check["bound"] == 2.0
    assert "6.18x" in check["text"]


@given(trained=st.floats(1e-6, 1e6), ratio=st.floats(0.01, 10))
def test_the_gap_is_the_ratio_where_there_is_one(trained: float, ratio: float) -> None:
    check = check_gap([step(1, train_loss=trained)], [evaluation(1, trained * ratio)])
    assert check["passed"] == (ratio < 2.0) or ratio == pytest.approx(2.0)


def test_the_gap_is_taken_at_the_weights_of_the_last_evaluation() -> None:
    """Steps after the last evaluation, and the high losses of the beginning, do not enter."""
    events = [step(number, train_loss=50.0) for number in range(1, 11)]
    events += [step(number, train_loss=2.0) for number in range(11, 31)]
    assert failed([*events, evaluation(5, 50.0), evaluation(30, 2.5), step(31, train_loss=0.1)]) == set()


def test_an_objective_that_is_not_finite_fails() -> None:
    assert "gap" in failed([*good_run(), evaluation(31, None)])


@pytest.mark.parametrize("sibling", ["train_loss_nonfinite", "grad_norm_nonfinite"])
def test_one_nan_in_the_last_epoch_fails_and_an_older_one_does_not(sibling: str) -> None:
    bad = {"verdict": "skip", "train_loss": None, sibling: "nan"}
    assert failed([*good_run(), step(25, **bad)]) == {"finite"}
    assert failed([step(15, **bad), *good_run()]) == set()


def test_an_overflow_of_the_loss_scale_is_no_nan() -> None:
    check = judged([*good_run(), step(25, verdict="retry", grad_norm=None, grad_norm_nonfinite="inf")])["finite"]
    assert check["passed"] and "1 overflows" in check["text"]


def test_weights_found_broken_between_steps_count() -> None:
    guard = {"event": "guard", "step": 28, "action": "rollback", "reason": "checked before saving; weights not finite"}
    assert failed([*good_run(), guard]) == {"finite"}


def test_a_run_shorter_than_an_epoch_says_so() -> None:
    assert "3.00" not in judged(good_run())["finite"]["text"]
    assert "0.30 epochs" in judged(good_run(), epoch_steps=100)["finite"]["text"]


def test_a_term_that_drowns_or_is_drowned_fails_in_the_phase_where_it_does() -> None:
    events = good_run()
    events += [step(number, phase="b", means={"kd": 412.0, "ce": 0.5}) for number in range(31, 41)]
    check = judged([*events, evaluation(40)])["balance"]
    assert not check["passed"] and "ce has 0.1% in phase b" in check["text"] and "phase a" not in check["text"]


def test_a_term_without_weight_that_enters_all_the_same_fails() -> None:
    feature = {"raw": 412.2, "weight": 0.0, "scaled": 41.22, "share": 0.43}
    events = [step(number) for number in range(1, 31)]
    for event in events:
        event["terms"]["feature"] = feature
    assert "feature has no weight" in judged([*events, evaluation(30)])["balance"]["text"]


def test_a_single_term_is_balanced_by_itself() -> None:
    events = [*(step(number, weights={"kd": 1.0}) for number in range(1, 31)), evaluation(30)]
    assert failed(events) == set()


def test_the_text_holds_what_was_measured() -> None:
    assert "57.1 against 100" in check_perplexity(57.12, 2000.0, 100.0)["text"]


def test_a_real_run_writes_its_checks(world: Path, tmp_path: Path) -> None:
    over = {"objectives__kd__weight": 0.5, "objectives__ce__weight": 0.5, "train__max_steps": 12}
    result = distill(load_config(overrides=tiny.settings(world, **over)), tmp_path / "run", device="cpu")
    summary = json.loads((result.folder / "summary.json").read_text())
    assert [check["passed"] for check in summary["checks"]] == [True] * 4
    student = summary["student"]
    assert student["intervals"]["perplexity"][0] <= student["perplexity"] <= student["intervals"]["perplexity"][1]
    assert {"top5_agreement", "top5_overlap", "acceptance", "calibration_error", "documents"} <= set(student)
