"""Laws of the success criteria: each check can fail, and fails for its own reason only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from stillroom.config import load_config
from stillroom.core.types import TermRecord
from stillroom.doctor.checks import is_loop, success_checks
from stillroom.telemetry import read_events
from stillroom.training.distill import distill
from stillroom.training.finish import earlier_seconds

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


def extra(*, samples: Sequence[dict[str, Any]] = (), bits: dict[str, float] | None = None) -> list[dict[str, Any]]:
    """The checks beyond the four that every run has."""
    return success_checks([{"event": "sample", **sample} for sample in samples], **BOUNDS, bits=bits or {})[4:]


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


@given(trained=st.floats(1e-3, 1e6), ratio=st.floats(0.01, 10))
def test_the_gap_is_the_ratio_where_there_is_one(trained: float, ratio: float) -> None:
    check = judged([step(10, train_loss=trained), evaluation(10, trained * ratio)])["gap"]
    assert check["passed"] == (ratio < 2.0) or ratio == pytest.approx(2.0)


def test_no_multiple_is_told_of_an_objective_that_is_nothing() -> None:
    check = judged([step(10, train_loss=1e-8), evaluation(10, 5.1e-4)])["gap"]
    assert check["passed"] and check["value"] is None and "x," not in check["text"]
    assert not judged([step(10, train_loss=1e-8), evaluation(10, 0.5)])["gap"]["passed"]


@pytest.mark.parametrize(
    ("before", "after", "teacher", "passed", "closed"),
    [
        (4.0, 2.0, 1.0, True, 2 / 3),
        (4.0, 3.0, 1.0, False, 1 / 3),
        (4.0, 4.5, 1.0, False, -1 / 6),
        (4.0, 0.5, 1.0, True, 3.5 / 3),
        (1.0, 1.0, 1.0, True, None),
        (1.0, 0.9, 2.0, True, None),
    ],
)
def test_the_closed_gap_is_that_between_the_student_before_and_the_teacher(
    before: float, after: float, teacher: float, passed: bool, closed: float | None
) -> None:
    (check,) = extra(bits={"student": after, "student_before": before, "teacher": teacher})
    assert check["passed"] is passed and check["value"] == (None if closed is None else pytest.approx(closed))


def test_without_a_teacher_there_is_no_gap_and_without_samples_no_loop_to_judge() -> None:
    assert extra(bits={"student": 2.0, "student_before": 4.0}) == [] == extra(samples=[])


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("The 10000000000", True),
        (" " * 48, True),
        ("first some words, then _line_line_line_line_line_line", True),
        ("the same sentence again. " * 5, True),
        ("", False),
        ("yes", False),
        ("aaaa", False),
        ("a long answer of many different words that ends with dots ........", False),
        ("1000", False),
        ("ha ha ha, said the maid, who keeps the room and knows how long a thing must be heated", False),
    ],
)
def test_a_text_that_ends_in_a_repeated_unit_is_a_loop(text: str, loops: bool) -> None:
    assert is_loop(text) is loops


def test_answers_in_loops_fail_unless_the_teacher_s_are() -> None:
    loop, text = "0" * 40, "spirits and waters"
    both = [{"student": loop, "teacher": text, "reference": text}, {"student": text, "teacher": text}]
    (check,) = extra(samples=both)
    assert not check["passed"] and check["value"] == 0.5
    assert extra(samples=[{**sample, "teacher": loop} for sample in both])[0]["passed"]
    assert extra(samples=[both[1], both[1], both[0]])[0]["passed"], "one of three"
    assert not extra(samples=[{"student": loop, "reference": text}])[0]["passed"]


def test_the_time_of_earlier_starts_is_read_from_the_log() -> None:
    def at(second: int, kind: str, **more: Any) -> dict[str, Any]:
        return {"event": kind, "time": f"2026-01-01T00:00:{second:02d}.000+00:00", **more}

    first = [at(10, "run_start", setup_seconds=4.0), at(12, "step"), at(20, "run_end")]
    second = [at(30, "run_start", setup_seconds=1.5), at(32, "step")]
    assert earlier_seconds(first) == 0.0 == earlier_seconds([])
    assert earlier_seconds([*first, *second]) == 14.0
    assert earlier_seconds([*first, *second, at(50, "run_start")]) == 14.0 + 3.5
    assert earlier_seconds([{"event": "run_start"}, {"event": "step", "time": "x"}, *second]) == 0.0


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


def test_after_a_few_steps_only_what_holds_at_any_length_is_judged() -> None:
    """A dry run of five steps fails none of the checks for its length."""
    loops = [{"event": "sample", "student": "so so so so so so", "teacher": "this and that"}]
    facts = {**BOUNDS, "perplexity": 400.0, "bits": {"student": 3.0, "student_before": 3.0, "teacher": 1.0}}
    events = {count: [*(step(number) for number in range(1, count + 1)), evaluation(count, 9.0)] for count in (9, 10)}
    found = {count: success_checks([*own, *loops], **facts) for count, own in events.items()}
    assert [check["name"] for check in found[9]] == ["no NaN for an epoch", "terms balanced as configured"]
    assert sum(not check["passed"] for check in found[10]) == 4
    sick = success_checks([*events[9][:-1], step(9, grad_norm=None, grad_norm_nonfinite="nan")], **facts)
    assert [check["passed"] for check in sick] == [False, True]


@pytest.mark.parametrize(("kl", "passed"), [(0.1, True), (0.3, False), (None, None)])
def test_a_teacher_in_context_is_to_be_approached_and_not_the_labels(kl: float | None, passed: bool | None) -> None:
    start = {"event": "run_start", "data": {"teacher_contexts": 40}}
    facts = {
        "bits": {"student": 2.1, "student_before": 2.0, "teacher": 1.0},
        "kl": {"student": kl, "student_before": 0.4},
    }
    without, having = (success_checks(events, **BOUNDS, **facts)[4:] for events in (good_run(), [start, *good_run()]))
    assert [(one["name"], one["passed"]) for one in without] == [("half of the gap to the teacher closed", False)]
    expected = [] if passed is None else [("half of the KL to the teacher closed", passed)]
    assert [(one["name"], one["passed"]) for one in having] == expected


def test_the_text_holds_what_was_measured() -> None:
    assert "57.1 against 100" in judged(good_run(), perplexity=57.12, max_perplexity=100.0)["perplexity"]["text"]


def test_a_student_with_its_teacher_s_weights_is_noticed(world: Path, tmp_path: Path) -> None:
    settings = tiny.settings(world, student__model=str(world / "teacher"), train__max_steps=1, eval__samples=0)
    made = distill(load_config(overrides=settings), tmp_path / "run", device="cpu")
    notes = [event["text"] for event in read_events(made.folder / "events.jsonl") if event["event"] == "note"]
    assert sum("the same weights" in note for note in notes) == 1


def test_a_real_run_writes_its_checks(world: Path, tmp_path: Path) -> None:
    over = {"objectives__kd__weight": 0.5, "objectives__ce__weight": 0.5, "train__max_steps": 12}
    result = distill(
        load_config(overrides=tiny.settings(world, eval__max_batches=4, eval__samples=1, **over)),
        tmp_path / "run",
        device="cpu",
    )
    summary = json.loads((result.folder / "summary.json").read_text())
    assert [check["passed"] for check in summary["checks"][:4]] == [True] * 4
    assert [check["name"] for check in summary["checks"][4:]] == [
        "half of the gap to the teacher closed",
        "answers do not repeat themselves",
    ]
    assert summary["total_seconds"] > summary["seconds"] > 0
    student = summary["student"]
    assert student["intervals"]["perplexity"][0] <= student["perplexity"] <= student["intervals"]["perplexity"][1]
    assert {"top5_agreement", "top5_overlap", "acceptance", "calibration_error", "documents"} <= set(student)
