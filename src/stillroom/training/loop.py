"""The training loop: the order of steps, evaluations, checkpoints and interruptions.

`training` is a generator: the caller may stop between any two steps.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from torch import Tensor

from stillroom.core.errors import Interrupted, StoppedByCaller
from stillroom.core.types import Batch, LossWeights
from stillroom.doctor.diagnose import diagnose
from stillroom.doctor.log_rules import Case
from stillroom.doctor.rules import Finding, roots
from stillroom.losses.mix import FALLBACK_LOSS
from stillroom.precision.device import memory_in_use
from stillroom.telemetry import EventLog
from stillroom.telemetry.record import Event, LoggedRun, scan_events
from stillroom.telemetry.wording import section
from stillroom.training.checkpoint import CheckpointSnapshots, no_save_left, tell_finished
from stillroom.training.evaluate import KEPT_BYTES, Evaluation, never_stop
from stillroom.training.gradients import term_gradients
from stillroom.training.memory import evaluate_held_out, micro_batch_rows, parts_of, trim_heap, within_memory
from stillroom.training.recover import check_state, is_sound, keep_snapshot, take_snapshot
from stillroom.training.rollouts import ensure_round
from stillroom.training.run import Run, RunState, kept_weights, weights_of
from stillroom.training.save import last_step_saved, record_rollback, save_checkpoint, save_stopped_student
from stillroom.training.schedule import NO_PHASE
from stillroom.training.select import is_better, is_off_course, measure, rank_of
from stillroom.training.step import StepOutcome, train_step

# ---- Requests to stop, from a signal or the time limit

# A closed terminal or a lost connection sends a hangup. Not every platform has it.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


class Stop:
    """A request to stop. It takes effect between two steps or two held-out batches."""

    def __init__(self, max_minutes: float = 0.0) -> None:
        self.reason = ""
        self.is_own = False  # a caller's loop asked, no signal and no clock
        self.saves_when_left = False  # a generator of steps that is closed saves and raises `StoppedByCaller`
        self.reserve = 0.0  # seconds that saving takes, subtracted from the time limit
        self._is_loading = False
        self._has_deadline = False
        self._began = time.monotonic()
        self._deadline = time.monotonic() + 60 * max_minutes if max_minutes else None

    @property
    def seconds(self) -> float:
        """The time since the command began."""
        return time.monotonic() - self._began

    def is_wanted(self) -> bool:
        if not self.reason and self._has_deadline and self.is_late():
            self.reason = "the time limit is reached"
        return bool(self.reason)

    def ask(self, reason: str) -> None:
        """Request a stop from inside the program."""
        self.is_own, self.reason = not self.reason, self.reason or reason

    def is_late(self) -> bool:
        """Whether saving now would end after the time limit."""
        return self._deadline is not None and time.monotonic() + self.reserve >= self._deadline

    def heed_clock(self) -> None:
        """Enforce the time limit from now on. Called after the first step, so that every start of a run makes progress.

        The limit counts from the start of the command, loading and the first evaluation included.
        """
        self._has_deadline = True

    @contextmanager
    def while_loading(self) -> Iterator[None]:
        """In the body a signal ends the command at once: there is nothing to save."""
        self.check_loading()
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False
        self.check_loading()  # a library may have caught the error that the signal raised

    def check_loading(self) -> None:
        if self.reason:
            raise Interrupted(
                f"stopped while loading: {self.reason}",
                advice=["give the same command again: nothing was trained yet, or what was is saved"],
            )

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGTERM, a hangup and Ctrl-C request a stop; a second Ctrl-C ends at once."""

        def request(number: int, _frame: FrameType | None) -> None:
            if self.reason and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.reason = f"received {signal.Signals(number).name}"
            if self._is_loading:
                self.check_loading()

        # Under nohup a hangup stays ignored.
        wanted = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        try:
            before = {number: signal.signal(number, request) for number in wanted}
        except ValueError:  # not in the main thread: the embedding program owns the signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


# ---- The loop


def training(run: Run, state: RunState, stop: Stop) -> Generator[StepOutcome, None, None]:
    """Train until the schedule ends. Yields after each attempted step, refused ones included.

    With `stop.saves_when_left`, closed between two steps it saves the state and raises `StoppedByCaller`.
    """
    with last_step_saved(run, state) if run.parallel.size > 1 else nullcontext(), no_save_left(run, state):
        yield from _steps(run, state, stop)


def _steps(run: Run, state: RunState, stop: Stop) -> Generator[StepOutcome, None, None]:
    run.student.train()
    start, already = time.monotonic(), state.seconds
    plan(run, state)
    state.reach.begin(run)
    if state.applied > 0:
        keep_snapshot(run, state)
    elif not (is_sound(run) and take_snapshot(run, state)):
        run.log.write("note", text="the student is not finite before the first step")
    if state.applied == 0 and isinstance(run.snapshots, CheckpointSnapshots):  # a rollback returns to it
        save_checkpoint(run, state)
    if state.owes_evaluation:
        with _stoppable(run, state, stop):
            evaluate_and_save(run, state, run.last_loss_weights(state), is_eval=True, is_save=True)
    is_first = True
    while state.applied < run.schedule.num_steps and not state.is_finished:
        if state.cursor in state.quarantined:
            state.cursor += 1
            continue
        if run.rollouts is not None:
            with _stoppable(run, state, stop):
                ensure_round(run, state)
        state.begun_at = run.log.position
        began, processor = time.monotonic(), time.process_time()
        window = run.loader.window(state.cursor)
        loaded = time.monotonic() - began
        if gradients_due(run, state):
            found = within_memory(run, state, lambda: term_gradients(run, state, list(parts_of(window, state))))  # noqa: B023
            run.log.write("gradients", step=state.applied + 1, **found)
        outcome = _first_step(run, state, window) if is_first else train_step(run, state, window)
        is_first = False
        state.seconds = already + time.monotonic() - start
        spent = Spent(time.monotonic() - began, loaded, time.process_time() - processor)
        run.log.write("step", **step_record(run, state, outcome, spent))
        state.begun_at = None
        tell_finished(run, state)
        state.pace.step_seconds = time.monotonic() - began
        stop.reserve = state.pace.seconds_to_stop(is_saving=run.saves.current is not None)
        stop.heed_clock()
        record_rollback(run, state)
        try:
            yield outcome
        except GeneratorExit:
            if not stop.saves_when_left:
                raise
            stop.ask("the loop over its steps was left")  # what is due after this step is done, and the state saved
        with _stoppable(run, state, stop):
            if outcome.verdict.action == "keep":
                after_applied_step(run, state, outcome)
                record_rollback(run, state)
            if state.applied < run.schedule.num_steps and run.parallel.any_of(stop.is_wanted()):
                check_state(run, state, outcome.evidence)  # a resumed run begins with the state saved here
                record_rollback(run, state)
                raise _StopHere


def _first_step(run: Run, state: RunState, window: list[Batch]) -> StepOutcome:
    """Take the first step of this start of the run, which compiles what is compiled."""
    name, about = ("compiling the student", None) if run.student.is_compiled else ("taking the first step", 0.0)
    with run.stages.stage(name, about=about):
        return train_step(run, state, window)


def gradients_due(run: Run, state: RunState) -> bool:
    """Measure at the first step and every `telemetry.gradient_steps` after it, at the first attempt of a window."""
    interval = run.config.telemetry.gradient_steps
    return bool(interval) and state.applied % interval == 0 and state.attempt == 0


class _StopHere(Exception):
    """Raised to end the run between two steps or two held-out batches."""


def stop_if_asked(run: Run, stop: Stop) -> None:
    """End the run if any of its processes was asked to stop."""
    if run.parallel.any_of(stop.is_wanted()):
        raise _StopHere


@contextmanager
def _stoppable(run: Run, state: RunState, stop: Stop) -> Iterator[None]:
    """In the body, a request to stop also takes effect between held-out batches; the state is saved first."""
    state.between_batches = lambda: stop_if_asked(run, stop)
    try:
        yield
    except _StopHere:
        save_checkpoint(run, state, is_awaited=True)
        save_stopped_student(run, state)
        reason = stop.reason or "another process was asked to"
        during = ", during its evaluation" if state.owes_evaluation else ""
        raise (StoppedByCaller if stop.is_own else Interrupted)(
            f"stopped at step {state.applied} of {run.schedule.num_steps}{during}: {reason}",
            where=str(run.folder),
            advice=[f"stillroom resume {run.folder}"],
        ) from None
    finally:
        state.between_batches = never_stop


def plan(run: Run, state: RunState) -> None:
    """Set the intervals of evaluations and checkpoints: as configured, else within a share of the run."""
    train, steps = run.config.train, run.schedule.num_steps
    state.pace.eval_steps = run.budget.eval_steps
    state.pace.save_steps = train.save_steps or train.eval_steps or math.ceil(steps / 10)
    # A rollback to the newest checkpoint must not depend on the clock.
    state.pace.is_save_fixed = bool(train.save_steps or train.eval_steps) or isinstance(
        run.snapshots, CheckpointSnapshots
    )


def after_applied_step(run: Run, state: RunState, outcome: StepOutcome) -> None:
    """Do what is due after this step: phase event, snapshot, evaluation, checkpoint."""
    if outcome.loss_weights.phase != state.phase:
        if state.phase:
            run.log.write("phase", step=state.applied, **{"from": state.phase, "to": outcome.loss_weights.phase})
        state.phase = outcome.loss_weights.phase
    is_last = state.applied >= run.schedule.num_steps
    is_eval = is_last or state.applied % state.pace.eval_steps == 0
    is_save = is_last or state.applied % state.pace.save_steps == 0
    # Check the state before anything is kept: a NaN in the embedding of an unused token shows in no loss.
    is_snapshot = state.applied % run.config.guard.snapshot_steps == 0
    # Before the first snapshot the guard has few statistics: check after 1, 2, 4, 8 ... steps.
    is_early = state.applied < run.config.guard.snapshot_steps and state.applied.bit_count() == 1
    if not (is_eval or is_save or is_snapshot or is_early):
        return
    exam = check_state(run, state, outcome.evidence)
    if exam is None:
        return
    if is_eval or is_save or is_snapshot:
        state.is_changing = True  # gates may be put back
        run.teacher.verify()
        run.teacher.training.look_after(state.applied, is_eval=is_eval)
        state.is_changing = False
    if is_snapshot:
        take_snapshot(run, state, exam)
    evaluate_and_save(run, state, outcome.loss_weights, is_eval=is_eval, is_save=is_save)


def evaluate_and_save(run: Run, state: RunState, loss_weights: LossWeights, *, is_eval: bool, is_save: bool) -> None:
    """Evaluate and save if due. A checkpoint records an interrupted evaluation, and a resumed run begins with it."""
    if is_eval:
        state.owes_evaluation = True
        result = run_evaluation(run, state, loss_weights)
        state.owes_evaluation = False
        judge_student(run, state, result)
    is_last = state.applied >= run.schedule.num_steps or state.is_finished
    is_worth_it = state.pace.is_save_worth_it(is_saving=run.saves.current is not None)
    if is_last or (is_save and run.parallel.broadcast(float(is_worth_it)) == 1.0):
        with run.stages.stage("saving a checkpoint", about=0.0):
            save_checkpoint(run, state, is_awaited=is_last)
    if is_eval or is_save:
        trim_heap()


# ---- Evaluation


def run_evaluation(
    run: Run,
    state: RunState,
    loss_weights: LossWeights | None = None,
    *,
    on_teacher: Callable[[Evaluation | None], None] | None = None,
) -> Evaluation:
    """Evaluate with the loss weights of the last step, so that train and eval objectives are comparable.

    `on_teacher` gets the teacher's own scores from the same pass before anything is logged of the student.
    """
    loss_weights = loss_weights or run.loss_weights(state)
    run.hooks.in_eval()
    result = evaluate_held_out(
        run,
        state,
        run.student,
        precision=run.precision,
        teacher=run.teacher,
        mix=run.mix,
        loss_weights=loss_weights,
        between=state.between_batches,
        answers=state.answers,
        scores_teacher=on_teacher is not None,
    )
    if on_teacher is not None:
        on_teacher(result.teacher)
    if state.answers.num_not_kept and state.evaluated is None:
        text = (
            f"the teacher's answers to {state.answers.num_not_kept:,} held-out batches are not kept: all of them take"
        )
        text += f" more than {KEPT_BYTES / 1e6:,.0f} MB, so it answers those again at every evaluation"
        run.log.write("note", text=text)
    result = measure(run, state, replace(result, perplexity=run.parallel.broadcast(result.perplexity)))
    run.parallel.check_replicas(replicas_of(run))
    state.evaluated = result
    is_best = is_better(result, state)
    run.log.write(
        "eval",
        step=state.applied,
        **result.yardsticks(),
        **result.chosen_by(),
        objective=result.objective,
        terms={name: vars(term) for name, term in result.terms.items()},
        unscored_tokens=result.unscored_tokens,
        tokens=result.tokens,
        seconds=result.seconds,
        best=is_best,
    )
    return result


def replicas_of(run: Run) -> dict[str, Tensor]:
    """Everything that is trained, by names that no two have."""
    projectors = dict(run.mix.projectors.named_parameters(prefix="projectors"))
    gates = {f"router.{name}": gate for name, gate in run.teacher.training.trained_weights().items()}
    return {**weights_of(run.student.model), **projectors, **gates}


def judge_student(run: Run, state: RunState, result: Evaluation) -> None:
    """Keep the student if it is the best so far; end the run after `early_stopping` evaluations without a better one.

    The student before training is judged first, so later ones must beat it.
    """
    rank = rank_of(result)
    state.last_perplexity, state.last_rank = (None if rank is None else result.perplexity), rank
    state.is_off_course = is_off_course(run, state, result)
    if is_better(result, state):
        state.best_perplexity, state.best_rank, state.best_step = result.perplexity, rank, state.applied
        state.evaluations_since_best = 0
        weights = kept_weights(run)
        state.best_weights = (
            run.disk_copies.copy(weights)
            if run.disk_copies is not None
            else {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
        )
        return
    state.evaluations_since_best += 1
    patience = run.config.train.early_stopping
    if patience and state.evaluations_since_best >= patience:
        run.log.write("note", text=f"stopped early: no better student in {patience} evaluations")
        state.is_finished = True


# ---- Records of the log


@dataclass(frozen=True)
class Spent:
    """What a step took: by the clock, waiting for its batches, and on the processors."""

    seconds: float
    loader_seconds: float
    cpu_seconds: float


def step_record(run: Run, state: RunState, outcome: StepOutcome, spent: Spent) -> dict[str, Any]:
    gpu, resident, percent = memory_in_use(run.device)
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
        "micro_batch_rows": micro_batch_rows(run, state),
        "rollbacks": state.rollbacks,
        "tokens": outcome.num_targets,
        "tokens_per_second": outcome.num_targets / max(spent.seconds, 1e-9),
        **vars(spent),
        "eta_seconds": remaining * state.seconds / max(state.attempted, 1),
        "phase": outcome.loss_weights.phase,
        "temperature": outcome.loss_weights.settings.get("kd.temperature", 1.0),
        "terms": {name: vars(term) for name, term in outcome.terms.items()},
        **_idle(outcome),
        "bad_teacher_rows": outcome.evidence.bad_teacher_rows,
        **({"sources": outcome.evidence.sources} if outcome.evidence.sources else {}),
        **outcome.evidence.samples,
        **_counted(outcome),
        "gpu_memory_gb": gpu,
        "memory_gb": resident,
        "memory_percent": percent,
    }


def _idle(outcome: StepOutcome) -> dict[str, list[str]]:
    """The terms that a curriculum keeps out of this step and that are not computed, where there are any."""
    if outcome.loss_weights.phase == NO_PHASE:
        return {}
    idle = [name for name, weight in outcome.loss_weights.weights.items() if not weight and name not in outcome.terms]
    return {"idle_terms": idle} if idle else {}


def _counted(outcome: StepOutcome) -> dict[str, float]:
    """The loss of positions taught by their labels, counters of clamps, and of rows without negatives in a contrast."""
    counters, fields = outcome.evidence.counters, {}
    if outcome.evidence.bad_teacher_rows and FALLBACK_LOSS in counters:
        fields[FALLBACK_LOSS] = counters[FALLBACK_LOSS] / outcome.evidence.bad_teacher_rows
    if "clamped_fraction_sum" in counters:
        fields["clamped_fraction"] = counters["clamped_fraction_sum"] / max(outcome.num_targets, 1)
    if "clamped_losses" in counters:
        fields["clamped_losses"] = counters["clamped_losses"]
    if "rows_without_contrast" in counters:
        fields["rows_without_contrast"] = counters["rows_without_contrast"]
    return fields


# ---- Say what a diagnosis finds while the run continues: each cause once, as an `advice` event

_NUM_STEPS = 1000  # the latest step records that are kept: advice about a run is about its present
_ASKED_AT = frozenset({"eval", "run_end"})
_LONGER = "train for longer, or at another learning rate"
_SAID_BY_THE_END = frozenset({"stopped_early", "stalled_run"})  # the record of the end has the reason


class Adviser:
    """A listener of the log that asks for a diagnosis after each evaluation and at the end.

    It keeps what a diagnosis reads in memory, so no evaluation reads the log again. A resumed run has what its log
    holds, and advice is given once.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._steps: deque[tuple[int, Event]] = deque(maxlen=_NUM_STEPS)  # with their place in the log
        self._others: list[tuple[int, Event]] = []
        self._position = 0
        self.said: set[str] = set()
        if log.position:
            for event in scan_events(log.path).records:
                self._keep(event)
        log.listen(self.handle)

    def handle(self, event: Event) -> None:
        self._keep(event)
        if event["event"] in _ASKED_AT and self._steps:
            for finding in self.findings(is_live=event["event"] != "run_end"):
                if finding.is_alarming and finding.cause not in self.said | _SAID_BY_THE_END:
                    self.said.add(finding.cause)
                    self._log.write("advice", step=self._steps[-1][1]["step"], **finding.to_dict())

    def _keep(self, event: Event) -> None:
        self._position += 1
        if event["event"] == "step":
            self._steps.append((self._position, event))
        elif event["event"] == "advice":
            self.said.add(str(event.get("cause")))
        elif event["event"] not in ("checkpoint", "sample", "note") or str(event.get("text")).startswith("injected "):
            self._others.append((self._position, event))

    def findings(self, *, is_live: bool) -> list[Finding]:
        """What is worth saying now: roots, and not what follows from them."""
        in_order = sorted([*self._others, *self._steps], key=lambda one: one[0])
        return roots(diagnose(Case(_record(tuple(event for _, event in in_order), {}), is_live=is_live)))


def _record(events: tuple[Event, ...], summary: dict[str, Any]) -> LoggedRun:
    starts = [event for event in events if event["event"] == "run_start"]
    return LoggedRun("run", section(starts[-1], "config") if starts else {}, events, summary)


def advice_of(events: tuple[Event, ...], summary: dict[str, Any], texts: Iterable[str]) -> list[dict[str, Any]]:
    """What the summary of a finished run says: the findings of the whole run.

    `texts` is what its end already says of how much was gained; it stands alone where nothing graver is found.
    """
    findings = diagnose(Case(_record(events, summary)))
    if not any(finding.is_alarming for finding in findings):
        findings = [*(Finding("hint", text, _LONGER, cause="little_gained") for text in texts), *findings]
    return [finding.to_dict() for finding in findings]
