"""How often each model runs: what a run costs next to its steps is held by counts, not by a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from stillroom.config import load_config
from stillroom.losses.head import products
from stillroom.teachers import Teacher
from stillroom.telemetry import read_events
from stillroom.training import distill as distill_module
from stillroom.training import finish, loop, recover
from stillroom.training.build import build_run
from stillroom.training.evaluate import KeptAnswers, evaluate
from stillroom.training.run import RunState

MICRO_BATCHES, EVAL_BATCHES = 2, 2


class Calls:
    """Forward passes of both models by the part of the run that asked for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._part = ["other"]
        build = build_run

        def counted(*args: Any, **options: Any) -> Any:
            run = build(*args, **options)
            for role, model in (("student", run.student.model), ("teacher", run.teacher.as_model().model)):
                body = next(part for name, part in model.named_children() if name == "model")
                body.register_forward_hook(lambda *_, role=role: self.counts.update([(self._part[-1], role)]))
            return run

        monkeypatch.setattr(distill_module, "build_run", counted)
        for place, name, part in (
            (loop, "train_step", "steps"),
            (loop, "run_evaluation", "evaluations"),
            (distill_module, "run_evaluation", "first evaluation"),
            (distill_module, "first_forward", "first forward"),
            (recover, "canary_loss", "canaries"),
            (finish, "evaluate_held_out", "end"),
            (finish, "save_tokens", "token view"),
            (finish, "read_again", "read again"),
        ):
            monkeypatch.setattr(place, name, self._within(part, getattr(place, name)))

    def _within(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self._part.append(part)
            try:
                return work(*args, **options)
            finally:
                self._part.pop()

        return call


@pytest.mark.parametrize(("num_steps", "eval_steps"), [(4, 4), (4, 1), (6, 2)])
def test_a_run_of_n_steps_with_e_evaluations_runs_each_model_a_known_number_of_times(
    num_steps: int, eval_steps: int, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    over: dict[str, Any] = {"train__gradient_accumulation_steps": MICRO_BATCHES, "eval__max_batches": EVAL_BATCHES}
    over |= {"train__max_steps": num_steps, "train__eval_steps": eval_steps}
    distill_module.distill(load_config(overrides=tiny.settings(world, **over)), tmp_path / "run", device="cpu")
    num_evaluations = num_steps // eval_steps
    events = read_events(tmp_path / "run" / "events.jsonl")
    is_last_best = [event["best"] for event in events if event["event"] == "eval"][-1]
    looks = {step for step in range(1, num_steps + 1) if step % eval_steps == 0 or step.bit_count() == 1}
    rows = min(4, 4 * EVAL_BATCHES)
    assert calls.counts == {
        ("steps", "student"): num_steps * MICRO_BATCHES,
        ("steps", "teacher"): num_steps * MICRO_BATCHES,
        ("first evaluation", "student"): EVAL_BATCHES,
        ("first evaluation", "teacher"): EVAL_BATCHES,  # its own row is of the same pass
        ("evaluations", "student"): num_evaluations * EVAL_BATCHES,  # and the teacher is not asked again
        ("first forward", "student"): 1,
        ("first forward", "teacher"): 1,
        ("canaries", "student"): 1 + len(looks),
        ("canaries", "teacher"): 1,  # the objective is the canary's loss, and the teacher's answer is kept
        ("token view", "student"): rows,
        ("token view", "teacher"): rows,
        ("read again", "student"): 1,
        **({} if is_last_best else {("end", "student"): EVAL_BATCHES}),
    }


def test_a_later_evaluation_is_the_same_with_kept_answers_and_asks_no_teacher(make_run: Callable[..., Any]) -> None:
    run, state = make_run(), RunState()
    loss_weights = run.loss_weights(state)
    options: dict[str, Any] = {"precision": run.precision, "mix": run.mix, "loss_weights": loss_weights}

    class Counted(Teacher):
        kind, num_asked = "dense", 0

        def observe(self, batch: Any, needs: Any) -> Any:
            self.num_asked += 1
            return run.teacher.observe(batch, needs)

    teacher, kept = Counted(), KeptAnswers()
    batches = run.eval_batches()
    results = [evaluate(run.student, batches, teacher=teacher, answers=kept, **options) for _ in range(2)]
    plain = evaluate(run.student, batches, teacher=run.teacher, **options)
    assert teacher.num_asked == len(batches)
    for result in results:
        assert result.yardsticks() == plain.yardsticks() and result.objective == plain.objective

    teacher.num_asked = 0
    few = KeptAnswers(most_bytes=10)
    for _ in range(2):
        evaluate(run.student, batches, teacher=teacher, answers=few, **options)
    assert teacher.num_asked == 2 * len(batches), "what does not fit is asked again"
    assert few.num_not_kept == 2 * len(batches), "and counted"


def test_each_head_is_multiplied_once_for_objective_and_yardsticks(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, state = make_run(), RunState()
    made: list[int] = []
    logits = products.Products.logits

    def counted(self: Any, part: slice) -> Any:
        made.append(part.stop - part.start)
        return logits(self, part)

    monkeypatch.setattr(products.Products, "logits", counted)
    batches = run.eval_batches()
    num_positions = sum(batch.num_scored for batch in batches)
    evaluate(
        run.student, batches, precision=run.precision, teacher=run.teacher, mix=run.mix,
        loss_weights=run.loss_weights(state), scores_teacher=True,
    )  # fmt: skip
    assert sum(made) == 2 * num_positions


def test_the_teachers_row_of_the_same_pass_is_that_of_its_own_evaluation(make_run: Callable[..., Any]) -> None:
    run, state = make_run(), RunState()
    batches, plain = run.eval_batches(), run.precision.plain()
    together = evaluate(
        run.student, batches, precision=run.precision, teacher=run.teacher, mix=run.mix,
        loss_weights=run.loss_weights(state), scores_teacher=True,
    )  # fmt: skip
    alone = evaluate(run.teacher.as_model(), batches, precision=plain, teacher=run.teacher)
    assert together.teacher is not None
    assert together.teacher.ledger.values() == pytest.approx(alone.ledger.values(), rel=1e-6)
    assert together.teacher.kl == 0.0 and together.teacher.agreement == 1.0
