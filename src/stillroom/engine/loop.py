"""Who owns time: the order of steps, evaluations, checkpoints and interruptions.

`training` is a generator: the caller drives it and may stop between any two steps.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import psutil
import torch

from stillroom.checkpoint import replaced_folder
from stillroom.engine.gradients import is_due, term_gradients
from stillroom.engine.recover import is_sound, keep_snapshot, look, take_snapshot
from stillroom.engine.routing import look_after_router
from stillroom.engine.run import Run
from stillroom.engine.state import RunState, capture, weights_of
from stillroom.engine.step import StepOutcome, train_step
from stillroom.engine.twins import check_twins
from stillroom.errors import CannotSave, Interrupted
from stillroom.evaluate import Evaluation, evaluate


class Stop:
    """A wish to end, from a signal or a clock, that is granted between two steps."""

    def __init__(self, max_minutes: float = 0.0) -> None:
        self.reason = ""
        self._deadline = time.monotonic() + 60 * max_minutes if max_minutes else None

    def is_wanted(self) -> bool:
        if not self.reason and self._deadline is not None and time.monotonic() >= self._deadline:
            self.reason = "the time limit is reached"
        return bool(self.reason)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C ask politely; a second Ctrl-C does not wait."""

        def ask(number: int, _frame: FrameType | None) -> None:
            if self.reason and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.reason = f"received {signal.Signals(number).name}"

        try:
            before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not in the main thread: the embedding program owns the signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def training(run: Run, state: RunState, stop: Stop) -> Iterator[StepOutcome]:
    """Train until the schedule ends. Yields after each attempted step, refused ones included."""
    run.student.train()
    start, already = time.monotonic(), state.seconds
    run.reach.begin(run)
    if state.applied > 0:
        keep_snapshot(run, state)
    elif not (is_sound(run) and take_snapshot(run, state)):
        run.log.write("note", text="the student is not finite before the first step")
    if state.applied == 0:
        save_checkpoint(run, state)
    while state.applied < run.schedule.num_steps and not state.is_finished:
        if state.cursor in state.quarantined:
            state.cursor += 1
            continue
        began = time.monotonic()
        window = run.loader.window(state.cursor)
        if is_due(run, state):
            run.log.write("gradients", step=state.applied + 1, **term_gradients(run, state, window))
        outcome = train_step(run, state, window)
        state.seconds = already + time.monotonic() - start
        run.log.write("step", **step_record(run, state, outcome, time.monotonic() - began))
        yield outcome
        if outcome.verdict.action == "keep":
            after_applied_step(run, state, outcome)
        if run.agree.anyone(stop.is_wanted()) and state.applied < run.schedule.num_steps:
            look(run, state, outcome.evidence)  # a resumed run begins with what is saved here, good or bad
            save_checkpoint(run, state)
            reason = stop.reason or "another process was asked to"
            raise Interrupted(
                f"stopped at step {state.applied} of {run.schedule.num_steps}: {reason}",
                where=str(run.folder),
                advice=[f"stillroom resume {run.folder}"],
            )


def after_applied_step(run: Run, state: RunState, outcome: StepOutcome) -> None:
    """What is due at this step: a phase event, a snapshot, an evaluation, a checkpoint."""
    if outcome.lesson.phase != state.phase:
        if state.phase:
            run.log.write("phase", step=state.applied, **{"from": state.phase, "to": outcome.lesson.phase})
        state.phase = outcome.lesson.phase
    is_last = state.applied >= run.schedule.num_steps
    is_eval = is_last or state.applied % eval_interval(run) == 0
    is_save = is_last or state.applied % (run.config.train.save_steps or eval_interval(run)) == 0
    # A NaN in the row of a token that no batch contained shows in no loss: before anything is kept, look.
    is_snapshot = state.applied % run.config.guard.snapshot_steps == 0
    # Before the first snapshot the statistics are few: look after 1, 2, 4, 8 ... steps.
    is_early = state.applied < run.config.guard.snapshot_steps and state.applied.bit_count() == 1
    if not (is_eval or is_save or is_snapshot or is_early):
        return
    seen = look(run, state, outcome.evidence)
    if seen is None:
        return
    if run.router is not None and (is_eval or is_save or is_snapshot):
        look_after_router(run, state, is_eval=is_eval)
    if is_snapshot:
        take_snapshot(run, state, seen)
    if is_eval:
        judge_student(run, state, run_evaluation(run, state, outcome))
    if is_save or state.is_finished:
        save_checkpoint(run, state)


def eval_interval(run: Run) -> int:
    """Rounded up: a short run is not evaluated after every step for want of ten."""
    return run.config.train.eval_steps or math.ceil(run.schedule.num_steps / 10)


# -- evaluation ------------------------------------------------------------------------------------------


def run_evaluation(run: Run, state: RunState, outcome: StepOutcome | None = None) -> Evaluation:
    """Evaluate with the lesson of the step just taken, so that train and eval objectives compare."""
    lesson = outcome.lesson if outcome else run.lesson(state)
    run.injector.in_eval()
    result = evaluate(
        run.student,
        run.eval_batches(),
        precision=run.precision,
        teacher=run.teacher,
        mix=run.mix,
        lesson=lesson,
    )
    result = replace(result, perplexity=run.agree.first(result.perplexity))
    check_twins(run)
    is_best = is_better(result, state)
    run.log.write(
        "eval",
        step=state.applied,
        **result.yardsticks(),
        objective=result.objective,
        terms={name: vars(term) for name, term in result.terms.items()},
        unscored_tokens=result.unscored_tokens,
        tokens=result.tokens,
        seconds=result.seconds,
        best=is_best,
    )
    return result


def is_better(result: Evaluation, state: RunState) -> bool:
    """A student that could not be scored everywhere is never the best."""
    if not math.isfinite(result.perplexity) or result.unscored_tokens:
        return False
    return state.best_perplexity is None or result.perplexity < state.best_perplexity


def judge_student(run: Run, state: RunState, result: Evaluation) -> None:
    """Keep the student if it is the best so far; end the run if it has not been for long enough.

    The student before training is judged first: whatever comes later must beat it.
    """
    is_scored = math.isfinite(result.perplexity) and not result.unscored_tokens
    state.last_perplexity = result.perplexity if is_scored else None
    if is_better(result, state):
        state.best_perplexity, state.best_step = result.perplexity, state.applied
        state.evaluations_since_best = 0
        run.best_weights = {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in weights_of(run.student.model).items()
        }
        return
    state.evaluations_since_best += 1
    patience = run.config.train.early_stopping
    if patience and state.evaluations_since_best >= patience:
        run.log.write("note", text=f"stopped early: no better student in {patience} evaluations")
        state.is_finished = True


# -- saving ----------------------------------------------------------------------------------------------


def save_checkpoint(run: Run, state: RunState) -> None:
    """Write a checkpoint. A full disk in the middle of a run is reported and the run goes on."""
    if not is_sound(run):
        run.log.write("note", text="weights are not finite: nothing is saved, the last good checkpoint stays")
        return
    if run.agree.is_first:
        _write_checkpoint(run, state)
    run.agree.wait()  # whoever rolls back to a checkpoint finds it whole


def _write_checkpoint(run: Run, state: RunState) -> None:
    began = time.monotonic()
    saved = capture(run, state)
    try:
        path = run.checkpoints.save(saved.step, saved.tensors, saved.scalars)
    except CannotSave as error:
        run.log.write("note", text=f"{error.what}; the run goes on, the last good checkpoint stays")
        return
    size = sum(file.stat().st_size for file in path.iterdir())
    run.log.write(
        "checkpoint",
        step=saved.step,
        path=str(path.relative_to(run.folder)),
        bytes=size,
        seconds=time.monotonic() - began,
    )


def save_student(run: Run) -> None:
    """Write the best student as a Hugging Face folder, whole or not at all; prune checkpoints if the disk is full."""
    for is_last_try in (False, True):
        try:
            with replaced_folder(run.folder / "student") as folder:
                run.student.model.save_pretrained(folder)
                run.tokenizer.save_pretrained(folder)
            return
        except OSError as error:
            if is_last_try:
                raise CannotSave(
                    f"cannot write the student: {error.strerror or error}",
                    where=str(run.folder / "student"),
                    advice=["free some space on that disk, then `stillroom resume` the run"],
                ) from error
            run.log.write("note", text="the disk is full: older checkpoints are removed to save the student")
            run.checkpoints.prune(keep=1)


@torch.no_grad()
def load_best(run: Run) -> None:
    """Put the best weights into the student."""
    living = weights_of(run.student.model)
    for name, tensor in run.best_weights.items():
        living[name].copy_(tensor)


# -- records ---------------------------------------------------------------------------------------------


def step_record(run: Run, state: RunState, outcome: StepOutcome, seconds: float) -> dict[str, Any]:
    gpu, resident, percent = memory(run.device)
    remaining = run.schedule.num_steps - state.applied
    return {
        "step": outcome.evidence.step,
        "train_loss": outcome.evidence.loss,
        "lr": outcome.learning_rate,
        "grad_norm": outcome.evidence.grad_norm,
        "verdict": outcome.verdict.action,
        "success_rate": state.success_rate,
        "consecutive_nans": run.guard.consecutive,
        "loss_scale": outcome.evidence.loss_scale,
        "skipped": state.skipped,
        "rollbacks": state.rollbacks,
        "tokens": outcome.num_targets,
        "tokens_per_second": outcome.num_targets / max(seconds, 1e-9),
        "seconds": seconds,
        "eta_seconds": remaining * state.seconds / max(state.attempted, 1),
        "phase": outcome.lesson.phase,
        "temperature": outcome.lesson.settings.get("kd.temperature", 1.0),
        "terms": {name: vars(term) for name, term in outcome.terms.items()},
        "bad_teacher_rows": outcome.evidence.bad_teacher_rows,
        **outcome.evidence.samples,
        **_counted(outcome),
        "gpu_memory_gb": gpu,
        "memory_gb": resident,
        "memory_percent": percent,
    }


def _counted(outcome: StepOutcome) -> dict[str, float]:
    """What clamps did to the step, where the user asked for them, and rows that had no other row to differ from."""
    counters, found = outcome.evidence.counters, {}
    if "clamped_fraction_sum" in counters:
        found["clamped_fraction"] = counters["clamped_fraction_sum"] / max(outcome.num_targets, 1)
    if "clamped_losses" in counters:
        found["clamped_losses"] = counters["clamped_losses"]
    if "rows_without_contrast" in counters:
        found["rows_without_contrast"] = counters["rows_without_contrast"]
    return found


def memory(device: torch.device) -> tuple[float, float, float]:
    """(GPU gigabytes in use, resident gigabytes of the process, percent of the training device's memory)."""
    resident = psutil.Process().memory_info().rss
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        total = torch.cuda.get_device_properties(device).total_memory
        return used / 1e9, resident / 1e9, 100.0 * used / total
    return 0.0, resident / 1e9, 100.0 * resident / psutil.virtual_memory().total
