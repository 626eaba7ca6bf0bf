"""The order of findings, and causes that a tiny run cannot provoke."""

from __future__ import annotations

from typing import Any

import pytest

from stillroom.doctor.diagnose import diagnose, finding_lines
from stillroom.doctor.log_rules import Case
from stillroom.doctor.rules import Finding, roots, rules_for
from stillroom.telemetry.record import LoggedRun


def step(number: int, **fields: Any) -> dict[str, Any]:
    base = {"event": "step", "step": number, "verdict": "keep", "train_loss": 2.0, "lr": 1e-3, "grad_norm": 0.5}
    return {**base, "seconds": 1.0, "phase": "constant", "terms": {}, **fields}


def case(*events: dict[str, Any], config: dict[str, Any] | None = None, **summary: Any) -> Case:
    return Case(LoggedRun("run", config or {}, events, summary))


def named(found: Case) -> list[str]:
    return [finding.cause for finding in diagnose(found)]


def test_an_empty_record_has_no_findings() -> None:
    assert diagnose(case()) == []


def test_a_root_comes_before_what_follows_from_it_and_is_as_grave() -> None:
    start = {"event": "run_start", "schedule": {"optimizer_steps": 40, "warmup_steps": 32, "gradient_accumulation": 8}}
    found = case(start, *(step(number) for number in range(1, 41)), config={"train": {"warmup_steps": 32}})
    findings = diagnose(found)
    assert [one.cause for one in findings] == ["schedule_in_micro_batches", "never_out_of_warmup"]
    assert [one.cause for one in roots(findings)] == ["schedule_in_micro_batches"]
    assert findings[0].setting == "train.warmup_steps=4"


def test_steps_counted_in_micro_batches_are_found_by_their_number() -> None:
    schedule = {"total_batches": 800, "gradient_accumulation": 16, "optimizer_steps": 800, "warmup_steps": 80}
    found = case({"event": "run_start", "schedule": schedule}, step(1), config={"train": {"max_steps": 800}})
    assert named(found)[0] == "schedule_in_micro_batches"
    assert diagnose(found)[0].setting == "train.max_steps=50"


def test_a_term_of_weight_zero_that_enters_the_evaluation_is_found() -> None:
    terms = {"feature": {"raw": 412.2, "weight": 0.0, "scaled": 41.22, "share": 0.43}}
    found = case(step(1), {"event": "eval", "step": 1, "perplexity": 9.0, "objective": 95.86, "terms": terms})
    assert diagnose(found)[0].cause == "active_when_zero" and diagnose(found)[0].steps == (1,)


def test_a_contrastive_term_of_batches_of_one_is_dead() -> None:
    terms = {
        "kd": {"raw": 2.0, "weight": 0.9, "scaled": 1.8, "share": 1.0},
        "contrastive": {"raw": 0.0, "weight": 0.1, "scaled": 0.0, "share": 0.0},
    }
    found = diagnose(case(*(step(number, terms=terms) for number in range(1, 6))))
    assert found[0].cause == "dead_component" and found[0].setting == "train.batch_size=8"


@pytest.mark.parametrize(("kl", "left", "is_coarse"), [(0.2, 2.0, True), (0.03, 0.1, True), (0.01, 0.5, False)])
def test_a_quantised_teacher_is_too_coarse_beside_what_is_left_to_learn(
    kl: float, left: float, is_coarse: bool
) -> None:
    quantised = {"event": "teacher_quantised", "kind": "int8", "kl": kl, "max_kl": 1.0}
    found = named(case(quantised, step(1), student={"kl": left}))
    assert ("quantised_teacher_too_coarse" in found) is is_coarse


def test_gates_that_made_the_teacher_worse_are_a_degraded_teacher() -> None:
    routers = [
        {"event": "router", "step": at, "alarm": at == 8, "teacher_nll": 2.0 + at / 10} for at in (0, 4, 8)
    ]  # fmt: skip
    found = diagnose(case(*routers, step(8), config={"train": {"learning_rate": 3e-3}}))[0]
    assert found.cause == "teacher_degraded" and found.steps == (8,)
    assert found.setting == "train.router_learning_rate=0.001"


def test_memory_that_grows_at_first_and_then_stays_is_no_creep() -> None:
    settled = [step(number, memory_gb=min(1.0 + 0.1 * number, 2.0)) for number in range(1, 61)]
    creeping = [step(number, memory_gb=1.0 + 0.05 * number) for number in range(1, 61)]
    assert "memory_creep" not in named(case(*settled)) and "memory_creep" in named(case(*creeping))


def test_harmful_settings_of_a_run_are_hints_after_its_findings() -> None:
    findings = diagnose(case(step(1), config={"guard": {"logit_clamp": 2.5}}))
    assert [(one.cause, one.severity) for one in findings] == [("clamped_logits", "hint")]


def test_what_a_cause_explains_is_a_cause() -> None:
    rules = rules_for("log")
    names = {rule.name for rule in rules}
    assert len(names) == len(rules)
    assert {name for rule in rules for name in rule.explains} <= names
    assert not [rule.name for rule in rules if rule.name in rule.explains]


def test_damaged_values_in_a_record_end_in_no_error() -> None:
    odd: dict[str, Any] = {"terms": {"kd": None, "ce": {"raw": "x", "weight": None}}, "loss_scale": "y", "seconds": 0}
    events = [
        {"event": "run_start", "schedule": None, "data": [], "machine": 3},
        *(step(number, **odd) for number in range(1, 30)),
        {"event": "eval", "step": 3, "perplexity": 5.0, "terms": 7, "intervals": {"perplexity": [1]}},
        {"event": "guard", "step": None, "action": None, "reason": None},
        {"event": "router", "alarm": True},
        {"event": "teacher_quantised", "kl": "high"},
    ]
    assert isinstance(diagnose(case(*events, config={"train": None, "curriculum": 4})), list)


def test_a_run_interrupted_in_its_warmup_is_stopped_and_nothing_else() -> None:
    """Before its first evaluation nothing is known about its rate."""
    events = [
        {"event": "run_start", "schedule": {"optimizer_steps": 600, "warmup_steps": 60}},
        {"event": "eval", "step": 0, "perplexity": 2000.0, "terms": {}},
        *(step(number) for number in range(1, 53)),
        {"event": "run_end", "status": "stopped", "exit_code": 75, "reason": "the time limit is reached"},
    ]
    assert named(case(*events)) == ["stopped_early"]


def test_a_proposed_setting_stands_on_one_line() -> None:
    """A line break inside the quotes would not be the same setting."""
    finding = Finding("warning", "9 " * 60, "x " * 60, "a.b=" + "{c = 1, d = 2} " * 9, (1,), cause="active_when_zero")
    lines = finding_lines(1, finding)
    assert lines[-1].endswith(f"--set '{finding.setting}'") and all(len(line) <= 80 for line in lines[:-1])


def test_a_weak_teacher_of_a_weaker_student_is_not_off_its_domain() -> None:
    def found(teacher: float) -> list[str]:
        terms = {"kd": {"raw": 1.0, "weight": 1.0, "scaled": 1.0, "share": 1.0}}
        first = {"event": "first_forward", "vocabulary": 2048}
        rows = {"teacher": {"perplexity": teacher}, "student_before": {"perplexity": 2000.0}}
        return named(case(first, step(1, terms=terms), **rows))

    assert "teacher_off_domain" not in found(110.0) and "teacher_off_domain" in found(1500.0)


@pytest.mark.parametrize(("last", "exit_code"), [(9.0, 0), (3.0, 22)])
def test_a_run_that_its_rate_drove_away_is_not_blamed_on_the_teacher(last: float, exit_code: int) -> None:
    """A teacher near a guess explains labels that got less likely, not an objective that rises."""

    def found(loss: float, code: int) -> list[Finding]:
        terms = {"kd": {"raw": 1.0, "weight": 1.0, "scaled": 1.0, "share": 1.0}}
        losses = [3.0] * 10 + [loss] * 10
        steps = [step(number, terms=terms, train_loss=one) for number, one in enumerate(losses, start=1)]
        first = {"event": "first_forward", "vocabulary": 2048}
        evaluation = {"event": "eval", "step": 20, "perplexity": 9e4, "terms": {}}
        rows = {"teacher": {"perplexity": 1500.0}, "student_before": {"perplexity": 2000.0}}
        end = {"event": "run_end", "status": "diverged", "exit_code": code, "reason": "so"}
        return diagnose(case(first, *steps, evaluation, end, config={"train": {"learning_rate": 3.0}}, **rows))

    blamed = found(last, exit_code)
    assert [one.cause for one in blamed][:2] == ["rate_too_high", "teacher_off_domain"]
    assert {"rate_too_high", "teacher_off_domain"} <= {one.cause for one in roots(blamed)}
    taught = found(3.0, 0)
    assert taught[0].cause == "teacher_off_domain" and "rate_too_high" in {one.cause for one in taught}
    assert "rate_too_high" not in {one.cause for one in roots(taught)}


def test_one_refused_batch_or_one_without_targets_is_a_hint() -> None:
    skips = [
        {"event": "guard", "step": 3, "action": "skip", "reason": "no scored target in the batch"},
        {"event": "guard", "step": 4, "action": "skip", "reason": "the student is sound, so the batch is at fault"},
    ]
    findings = diagnose(case(*(step(number) for number in range(1, 10)), *skips))
    assert {one.cause: one.severity for one in findings} == {"masked_out_data": "hint", "refused_batches": "hint"}


@pytest.mark.parametrize(("num_refused", "cause"), [(2, "refused_batches"), (8, "rate_too_high")])
def test_ordinary_batches_refused_in_a_row_are_blamed_on_the_rate(num_refused: int, cause: str) -> None:
    reason = "kd 4 stands above 3, far outside the last 50 steps"
    skips = [{"event": "guard", "step": 10, "action": "skip", "reason": reason}] * num_refused
    steps = (step(number) for number in range(1, 10))
    first = diagnose(case(*steps, *skips, config={"train": {"learning_rate": 0.01}}))[0]
    assert first.cause == cause
    assert first.setting == ("train.learning_rate=0.001" if cause == "rate_too_high" else "")


@pytest.mark.parametrize(("samples", "is_dead"), [([1.0], False), ([1.0, 1.0], True), ([1.0, 0.0], False)])
def test_gradients_are_called_zero_only_by_more_than_the_first_sample(samples: list[float], is_dead: bool) -> None:
    steps = [step(number, zero_gradient_fraction=share) for number, share in enumerate(samples, start=1)]
    assert ("zero_gradients" in named(case(*steps, step(len(samples) + 1)))) is is_dead


def guard_event(number: int, action: str = "rollback") -> dict[str, Any]:
    return {"event": "guard", "step": number, "action": action, "reason": "the loss is nan"}


def injected(name: str, number: int) -> dict[str, Any]:
    return {"event": "note", "text": f"injected {name} at step {number}: on purpose"}


def only(found: Case, cause: str) -> Finding:
    return next(one for one in diagnose(found) if one.cause == cause)


@pytest.mark.parametrize(("mode", "key"), [("fp32", "train.learning_rate"), ("fp16-mixed", "precision.mode")])
def test_fp32_is_advised_to_runs_that_are_not_in_it(mode: str, key: str) -> None:
    start = {"event": "run_start", "precision": {"mode": mode}}
    found = case(start, step(1), guard_event(2), config={"precision": {"mode": "auto"}, "train": {"learning_rate": 1}})
    assert only(found, "divergence").setting.partition("=")[0] == key


@pytest.mark.parametrize("mode", ["fp32", "fp16-mixed"])
def test_a_batch_is_to_be_replayed_only_where_the_state_was_given_up(mode: str) -> None:
    start = {"event": "run_start", "precision": {"mode": mode}}
    worse = {"event": "run_end", "status": "diverged", "exit_code": 22, "reason": "no better student"}
    for events, is_replayed in (([worse], False), ([guard_event(2), worse], True)):
        found = case(start, step(1), *events, config={"train": {"learning_rate": 1}})
        assert ("replay" in only(found, "divergence").remedy) == is_replayed


@pytest.mark.parametrize(
    ("fault", "cause", "action"),
    [("nan_weight", "divergence", "rollback"), ("inf_grad", "refused_batches", "skip")],
)
def test_what_was_injected_is_not_advised_away(fault: str, cause: str, action: str) -> None:
    config = {"precision": {"mode": "fp16-mixed"}, "train": {"learning_rate": 1e-3}}
    events = [step(1), injected(fault, 2), guard_event(2, action), guard_event(4, action)]
    found = only(case(*events, config=config), cause)
    assert found.setting == "" and fault in found.advice
    late = only(case(*events, guard_event(40, action), config=config), cause)
    assert fault not in late.advice, "step 40 is not explained by a fault of step 2"


def test_a_degraded_teacher_is_advised_what_it_is_not_yet() -> None:
    bad = [step(number, bad_teacher_rows=4) for number in range(1, 5)]
    settings = {
        "half": ({"dtype": "float16"}, "teacher.dtype=float32"),
        "whole": ({"dtype": "float32"}, ""),
        "auto on a CPU": ({"dtype": "auto"}, ""),
        "served": ({"dtype": "auto", "server": "http://box"}, ""),
        "stored": ({"dtype": "float16", "cache": "answers"}, ""),
    }
    told = {name: only(case(*bad, config={"teacher": one}), "teacher_degraded") for name, (one, _) in settings.items()}
    assert {name: one.setting for name, one in told.items()} == {name: want for name, (_, want) in settings.items()}
    assert len({one.advice for one in told.values()}) == 4  # `whole` and `auto on a CPU` are the same


@pytest.mark.parametrize(("held_out", "setting"), [("a.jsonl", "data.eval=none"), (None, "")])
def test_data_eval_is_left_out_where_it_was_given(held_out: str | None, setting: str) -> None:
    first = {"event": "first_forward", "alignment": {"model": "teacher", "as_given": 1.0}}
    events = [first, step(1), {"event": "teacher_eval", "perplexity": 1e4}]
    found = only(case(*events, config={"data": {"eval": held_out}}), "train_eval_gap")
    assert found.setting == setting and "leave data.eval out" not in (found.advice if held_out is None else "")
    start = {"event": "run_start", "data": {"overlapping_records": 5, "eval_documents": 50}}
    assert only(case(start, step(1), config={"data": {"eval": held_out}}), "leaking_data").setting == setting


def test_a_run_that_would_end_the_same_way_is_not_to_be_resumed() -> None:
    ends = {code: {"event": "run_end", "exit_code": code, "reason": "so"} for code in (22, 75)}
    start = {"event": "run_start", "schedule": {"optimizer_steps": 9}}
    told = {code: only(case(start, step(1), end), "stopped_early").advice for code, end in ends.items()}
    assert "resume" in told[75] and "resume" not in told[22]
