"""Build or resume a run, train it, and write its results into its folder."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch

from stillroom.config import Config
from stillroom.config.load import embedded_notes, unread_notes
from stillroom.config.schema import MOST_FLOAT, STRATEGIES
from stillroom.core.errors import BrokenAtStart, CheckpointUnusable, ConfigError, Fault, StillroomError, is_panic
from stillroom.core.files import mend, reason_of
from stillroom.core.shortages import explained
from stillroom.core.types import Detail
from stillroom.data.chat import prints_day
from stillroom.data.corpus import row_lengths
from stillroom.data.sources import refuse_missing
from stillroom.models import Student
from stillroom.models.load import not_finite_advice
from stillroom.parallel import Parallel
from stillroom.parallel.base import join
from stillroom.precision.adamw import describe_update
from stillroom.precision.device import deterministic, find_device, teacher_dtype, wide_sums
from stillroom.telemetry import EventLog, SilentLog
from stillroom.telemetry.events import Listening, Stages
from stillroom.telemetry.trackers import open_tracking
from stillroom.training import cut_rounds
from stillroom.training import run_folder as run_folder
from stillroom.training.build import build_run
from stillroom.training.checkpoint import CheckpointStore, Mark, Saved
from stillroom.training.evaluate import Evaluation, summary_row
from stillroom.training.finish import FINISHED, Result, finish, result_or_error
from stillroom.training.loop import Adviser, Stop, judge_student, run_evaluation, training
from stillroom.training.memory import evaluate_held_out, find_micro_batch, return_unused_memory
from stillroom.training.models import Models, load_models, student_name, unused_strategy
from stillroom.training.preflight import InputCheck, doubts, find_loss_scale, first_forward
from stillroom.training.recover import state_to_return_to
from stillroom.training.run import Run, RunState, restore, restore_history, why_unusable, why_unusable_mark
from stillroom.training.run_folder import NONE, Claim, Inputs, Trust, opened
from stillroom.training.save import save_checkpoint
from stillroom.training.select import benchmarks
from stillroom.training.step import StepOutcome
from stillroom.training.student import start_note

# -- resume ----------------------------------------------------------------------------------------
# Find the checkpoint and log to continue a run from, restore it, and record how a run ends.


def newest_checkpoint(folder: Path, config: Config) -> Saved | None:
    """The newest checkpoint that verifies. Change nothing: the run may be training."""
    return CheckpointStore(folder / "checkpoints", config.checkpoint.keep).load_newest(why_unusable)


def newest_state(folder: Path, config: Config, parallel: Parallel) -> tuple[Saved | None, Mark | None]:
    """The newest checkpoint that verifies, and the mark of a rollback after it, if any.

    Remove the files of an interrupted save first. A run without a checkpoint begins again: its mark is forgotten too.
    """
    store = CheckpointStore(folder / "checkpoints", config.checkpoint.keep)
    if parallel.is_first:
        mend(folder)
        store.sweep()
    parallel.wait()
    saved, mark = store.load_newest(why_unusable), store.mark()
    if mark is not None and store.is_empty:
        parallel.wait()  # until all have read it
        if parallel.is_first:
            store.forget_mark()
        return None, None
    if mark is None or (saved is not None and saved.line >= mark.line):
        return saved, None
    if reason := why_unusable_mark(mark):
        raise store.unusable_mark(reason)
    return saved, mark


def open_log(folder: Path, saved: Saved | None, mark: Mark | None) -> EventLog:
    """The run's log, cut back to the state it is continued from."""
    if mark is not None:
        return EventLog(folder / "events.jsonl", keep_records=int(mark.history["events"]), keep_until_step=mark.to)
    if saved is None:
        return EventLog(folder / "events.jsonl", keep_records=0, keep_until_step=-1)
    known = saved.scalars.get("events")
    return EventLog(folder / "events.jsonl", keep_records=known, keep_until_step=saved.step)


def _check_base(saved: Saved, run: Run) -> None:
    """Raise if the weights under an adapter are not those it was trained on: no checkpoint holds them."""
    begun, here = saved.scalars.get("base"), run.adapter.base_identity if run.adapter else None
    if begun != here:
        raise CheckpointUnusable(
            f"the weights under the adapter are not those the run began with: their hash was {begun} and is {here}",
            where=run.config.student.model,
            advice=[
                "put the student's model back as it was",
                "begin again with the present one: another folder with --out",
            ],
        )


def precision_of(saved: Saved | None) -> str:
    """The mode a checkpoint was written in: it belongs to the run, whatever `auto` would choose on this device."""
    return str(saved.scalars["precision"]["mode"]) if saved is not None else ""


def processes_of(saved: Saved | None) -> int:
    """The number of processes that a run began with: its windows and its schedule depend on it. 0 before it began."""
    return int(saved.scalars.get("processes", 1)) if saved is not None else 0


def moved_processes(saved: Saved, run: Run) -> str:
    """A note where a run continues with another number of processes; else empty."""
    before, now = processes_of(saved), run.parallel.size
    if before == now:
        return ""
    text = f"begun with {before} processes, continued with {now}: the same rows in the same order and the same steps"
    idle = now - run.config.train.gradient_accumulation_steps * before
    if idle > 0:
        text += f"; {idle} of the {now} have nothing to do, because a step has {now - idle} micro-batches"
    return f"{text}; sums are added in another order, and random numbers of dropout are others"


def moved_device(saved: Saved, run: Run) -> str:
    """A note where a run continues on another kind of device; else empty."""
    before = saved.scalars["precision"].get("device", run.device.type)
    if before == run.device.type:
        return ""
    return (
        f"the checkpoint is from {before} and the run continues on {run.device.type}, in {run.precision.mode} "
        "as before: its numbers are no longer those of an uninterrupted run to the last bit"
    )


def restore_checkpoint(run: Run, state: RunState, saved: Saved, *, takes_other_base: bool = False) -> None:
    """Restore a checkpoint into a run built from the same configuration."""
    if not takes_other_base:
        _check_base(saved, run)
    try:
        restore(run, state, saved)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointUnusable(
            f"the checkpoint of step {saved.step} does not fit the run: {reason_of(error)}",
            where=str(run.folder / "checkpoints"),
            advice=[
                "check that the models are those the run began with",
                "or that this version of stillroom is the one that saved it, see config.json",
            ],
        ) from error


@contextmanager
def recorded_end(log: EventLog, folder: Path) -> Iterator[None]:
    """Log how the run ended. Turn errors of memory and disk into errors with advice."""
    try:
        yield
    except StillroomError as error:
        log.write("run_end", status="stopped", exit_code=error.exit_code, reason=str(error.what))
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        end = explained(error, str(folder)) or Fault(f"{type(error).__name__}: {reason_of(error)}")
        log.write("run_end", status="stopped", exit_code=end.exit_code, reason=str(end.what))
        if isinstance(end, Fault):
            raise
        raise end from error


class Step:
    """One attempted step of a run, for a caller's own loop: its record, and what the loop can ask of the run.

    - `number`: of the optimizer step, from 1 on; `num_steps`: of the whole run.
    - `loss`: the weighted sum of the terms, mean over scored tokens; `terms`: each without its weight; `weights`.
    - `verdict`: "keep", or what was done instead of an update.
    - `learning_rate`, `grad_norm`; `tokens`: scored in this step.
    """

    def __init__(self, outcome: StepOutcome, run: Run, state: RunState, stop: Stop) -> None:
        self._run, self._state, self._stop = run, state, stop
        self.number: int = outcome.evidence.step
        self.num_steps: int = run.schedule.num_steps
        self.loss: float = outcome.evidence.loss
        self.terms: dict[str, float] = dict(outcome.evidence.terms)
        self.weights: dict[str, float] = dict(outcome.loss_weights.weights)
        self.verdict: str = outcome.verdict.action
        self.learning_rate: float = outcome.learning_rate
        self.grad_norm: float = outcome.evidence.grad_norm
        self.tokens: int = outcome.num_targets

    def __repr__(self) -> str:
        return f"Step({self.number} of {self.num_steps}, loss={self.loss:.4g}, verdict={self.verdict!r})"

    def stop(self) -> None:
        """Save after this step and end the run, which can be resumed."""
        self._stop.ask("the caller's loop asked to")

    def set_weight(self, term: str, weight: float) -> None:
        """Set the weight of a term from the next step on, instead of the configuration's and the curriculum's.

        It is an event of the log and part of every later checkpoint, so a resumed run has it. Only terms that the run
        was built with can be set. With several processes each must set the same.
        """
        known = sorted(name for name, value in self._run.curriculum.weights.items() if value != 0.0)
        if term not in known:
            advice = [f"the terms of this run are {', '.join(known)}", f"give {term} a small weight in the settings"]
            raise ConfigError(f"{term} is not a term of this run", where="set_weight", advice=advice)
        if not 0.0 <= weight <= MOST_FLOAT:
            raise ConfigError(f"weight of {term} is {weight!r}", where="set_weight", advice=["a number of at least 0"])
        self._state.set_weights[term] = float(weight)
        self._state.weights_set_at = self._state.applied
        self._run.log.write("weight_set", step=self._state.applied, term=term, weight=float(weight))


def distill(config: Config, out: str | Path, **options: Any) -> Result:
    """Distil as configured into a folder or an address of a store; `steps` has the options."""
    return exhaust(steps(config, out, **options))


def exhaust(taken: Generator[Step, None, Result]) -> Result:
    """Take all steps of a run and return its result."""
    while True:
        try:
            next(taken)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def steps(
    config: Config,
    out: str | Path,
    *,
    device: str = "auto",
    inject: str = "",
    listeners: tuple[Callable[[dict[str, Any]], None], ...] = (),
    notes: tuple[str, ...] = (),
    inputs: Inputs | None = None,
    accept_changed_inputs: bool = False,
    max_steps: int | None = None,
) -> Generator[Step, None, Result]:
    """Distil as configured into a folder or an address of a store. Resume an unfinished run of the same configuration.

    `inputs` are models and data given as objects: the first process writes them to the paths of `inputs.settings(out)`,
    which the configuration names. A resumed run whose data or models are not those it began with is refused, unless
    `accept_changed_inputs`. `max_steps` continues a finished run to so many steps.
    """
    stop = Stop(config.train.max_minutes)
    stop.saves_when_left = True
    with stop.on_signals():
        with stop.while_loading():
            parallel = _join(config)
            device_notes: list[str] = []
            where = find_device(device, device_notes.append)
            notes = (*embedded_notes(config), *notes, *unread_notes(config), *device_notes)
        first = parallel.is_first
        with (
            opened(out) as place,
            deterministic(where),
            wide_sums(where),  # a half teacher's products too
            run_folder.owned(place.folder, config, is_first=first) as claim,
        ):
            claim.sender, notes = place.sender, (*notes, *place.notes)
            if parallel.broadcast(float(claim.is_resumed)) and not parallel.is_first:
                claim.is_resumed, claim.config = run_folder.find_run(claim.folder, config)
            if inputs is not None:
                with stop.while_loading():
                    columns = config.data.needed_columns
                    kept = inputs.keep(claim.folder, is_resumed=claim.is_resumed, columns=columns) if first else ()
                    parallel.wait()
                notes = (*notes, *kept)
            finished, doubt = run_folder.read_summary(claim.folder) if claim.is_resumed else ({}, "")
            if max_steps is not None:
                notes = (*notes, _extend(claim, finished, max_steps, parallel))
            elif finished.get("status") in FINISHED:
                if first:
                    _teller(listeners)(_already_finished(claim, finished))
                return result_or_error(Result(claim.folder, finished, already_finished=True))
            notes = (*notes, doubt) if doubt else notes
            options: dict[str, Any] = {"accepts": accept_changed_inputs, "extends": max_steps is not None}
            if not cut_rounds.is_one_run(claim.config):
                _check_rounds(claim, parallel)
                for number in range(1, claim.config.student.shrink.rounds):
                    told = yield from _round(claim, number, parallel, where, stop, inject, listeners, **options)
                    notes = (*notes, told)
                _teller(listeners)(f"round {number + 1} of {number + 1}, in {claim.folder}")
            return result_or_error((yield from _run(claim, parallel, where, stop, inject, listeners, notes, **options)))


def _check_rounds(claim: Claim, parallel: Parallel) -> None:
    """Refuse what a student that is cut in rounds cannot have, then describe the run: its rounds come before it."""
    if parallel.size > 1 or claim.sender is not None:
        what = "several processes" if parallel.size > 1 else "a run in a store"
        raise ConfigError(
            f"student.shrink.rounds does not work with {what}",
            where="student.shrink.rounds",
            advice=["--set student.shrink.rounds=1"],
        )
    cut_rounds.of_round(claim.config, claim.folder, 1)  # refuses too few steps
    if not claim.is_resumed:
        claim.describe()


def _round(
    claim: Claim,
    number: int,
    parallel: Parallel,
    where: torch.device,
    stop: Stop,
    inject: str,
    listeners: tuple[Callable[[dict[str, Any]], None], ...],
    **options: Any,
) -> Generator[Step, None, str]:
    """Train a round before the last in its own folder, or read its result. Return a note for the log."""
    config, folder = cut_rounds.of_round(claim.config, claim.folder, number), cut_rounds.folder_of(claim.folder, number)
    name = f"round {number} of {claim.config.student.shrink.rounds}"
    with run_folder.owned(folder, config) as own:
        summary = run_folder.read_summary(folder)[0] if own.is_resumed else {}
        if summary.get("status") not in FINISHED:
            _teller(listeners)(f"{name}, in {folder}")
            try:
                summary = (yield from _run(own, parallel, where, stop, inject, listeners, (), **options)).summary
            except StillroomError as error:
                error.advice = tuple(one.replace(f"resume {folder}", f"resume {claim.folder}") for one in error.advice)
                raise
            return_unused_memory()
        result_or_error(Result(folder, summary))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return cut_rounds.told(name, summary)


def _extend(claim: Claim, finished: Mapping[str, Any], max_steps: int, parallel: Parallel) -> str:
    """Let a finished run have more steps. Its summary stays as summary-STEPS.json. Return a note."""
    done = finished.get("steps")
    if finished.get("status") not in FINISHED or not isinstance(done, int) or done >= max_steps:
        state = f"has {done:,} steps" if isinstance(done, int) else "is not finished"
        raise ConfigError(
            f"max_steps is {max_steps:,}, and the run in {claim.folder} {state}",
            where="max_steps",
            advice=["give more steps than it has", f"or finish it first: stillroom resume {claim.folder}"],
        )
    if claim.sender is not None:
        raise ConfigError("a finished run in a store cannot be continued", where="max_steps", advice=["copy it here"])
    if not cut_rounds.is_one_run(claim.config):
        raise ConfigError(
            "a finished run that was cut in rounds cannot be continued: their steps are shares of all",
            where="max_steps",
            advice=["begin a run from its student: --student"],
        )
    train = claim.config.train.model_copy(update={"max_steps": max_steps})
    claim.config = claim.config.model_copy(update={"train": train})
    parallel.wait()  # until all have read the summary
    if parallel.is_first:
        claim.describe()
        (claim.folder / run_folder.SUMMARY).rename(claim.folder / f"summary-{done}.json")
    parallel.wait()
    return (
        f"a finished run of {done:,} steps continues to {max_steps:,}: schedule and curriculum are from here on those "
        "of the longer run, so it is not what an uninterrupted run of that length gives"
    )


def _join(config: Config) -> Parallel:
    return join(config.train.peer_timeout_minutes, config.train.strategy, config.train.shard_size)


def _run(
    claim: Claim,
    parallel: Parallel,
    where: torch.device,
    stop: Stop,
    inject: str,
    listeners: tuple[Callable[[dict[str, Any]], None], ...],
    notes: tuple[str, ...],
    *,
    accepts: bool,
    extends: bool,
) -> Generator[Step, None, Result]:
    """Load, build, train and finish a run in a claimed folder. `accepts`: with other inputs than before."""
    folder, config = claim.folder, cut_rounds.last_round(claim.config, claim.folder)
    refuse_missing(*_data_specs(config))  # before the models, which take longer
    saved, mark = newest_state(folder, config, parallel) if claim.is_resumed else (None, None)
    check, stages = InputCheck(saved, accepts, parallel), Stages(Listening(listeners if parallel.is_first else ()))
    with stop.while_loading():
        benchmarks(config.eval.tasks)
        with stages.stage("checking the models' files"):
            check.models(config)
        dated = config.on_day(config.data.day or _day(claim, parallel))
        models = load_models(
            dated, where, folder=folder, parallel=parallel, tell=_teller(listeners), begun_in=precision_of(saved),
            stages=stages,
        )  # fmt: skip
    if _prints_day(models):
        config, claim.config = dated, claim.config.on_day(dated.data.day)
    if parallel.is_first and not claim.is_resumed:
        claim.describe()
    log = open_log(folder, saved, mark) if parallel.is_first else SilentLog()
    stages.sink = log
    for listener in listeners:
        log.listen(listener)
    if parallel.is_first:
        Adviser(log)
        if config.telemetry.tracker != "none":
            tracking = open_tracking(config, folder, lambda text: log.write("note", text=text))
            if tracking is not None:
                log.listen(tracking)
        if claim.sender is not None:
            claim.sender.attach(log)
    with log, recorded_end(log, folder), ExitStack() as ending:
        with stop.while_loading():
            run = build_run(
                config,
                folder,
                log,
                device=where,
                models=models,
                inject=inject,
                parallel=parallel,
                lock=claim.lock,
                begun_in=precision_of(saved),
                begun_with=processes_of(saved),
                inputs=check,
                stages=stages,
            )
        ending.callback(run.teacher.close)
        claim.is_begun = True
        state = RunState()
        _announce(run, models, notes, saved, check, stop.seconds)
        if saved is not None:
            restore_checkpoint(run, state, saved, takes_other_base=accepts)
            state.is_finished &= not extends  # a run that stopped early continues too
        return (yield from _train(run, state, models.vocabularies, saved, mark, stop, check.changed))


def _data_specs(config: Config) -> list[tuple[str, str]]:
    """(setting, spec) of the data that a run reads."""
    prompts = config.rollouts.prompts if config.rollouts is not None else "train"
    return [
        *(("data.train", source.path) for source in config.data.sources),
        *([("data.eval", config.data.eval)] if config.data.eval is not None else []),
        *([("rollouts.prompts", prompts)] if prompts != "train" else []),
    ]


def resume(
    folder: str | Path,
    *,
    max_minutes: float | None = None,
    strategy: str | None = None,
    shard_size: int | None = None,
    trust: Trust = NONE,
    **options: Any,
) -> Result:
    """Continue the run in a folder, bit for bit. Return the result of a finished run, or with `max_steps` continue it.

    Raise `InputsChanged` where the data, the teacher or the student's folder are not those it began with, unless
    `accept_changed_inputs`. `steps` has the options.

    With another number of processes or another `strategy` it continues with the same rows in the same order, and with
    the same numbers up to the order of sums. `shard_size` belongs to `fsdp`: another strategy drops the run's own.
    """
    if shard_size is None and strategy not in (None, "fsdp"):
        shard_size = 0
    given = {"max_minutes": max_minutes, "strategy": strategy, "shard_size": shard_size}
    changed = {key: value for key, value in given.items() if value is not None}
    if strategy not in (None, *STRATEGIES):
        raise ConfigError(f"unknown strategy {strategy!r}", where="--strategy", advice=[" or ".join(STRATEGIES)])
    with opened(folder) as place:
        config = place.read_config(trust)
        config = config.model_copy(update={"train": config.train.model_copy(update=changed)})
        return distill(config, place.folder, **options)


def _teller(listeners: tuple[Callable[[dict[str, Any]], None], ...]) -> Callable[[str], None]:
    """Notes for the listeners while there is no log yet."""

    def tell(text: str) -> None:
        for listener in listeners:
            listener({"event": "note", "text": text, "detail": isinstance(text, Detail)})

    return tell


def _day(claim: Claim, parallel: Parallel) -> str:
    """The day on which the run began, as the first process sees it: midnight may pass between two processes."""
    day = (run_folder.begun_on(claim.folder) if claim.is_resumed else None) or date.today()
    return date.fromordinal(int(parallel.broadcast(float(day.toordinal())))).isoformat()


def _prints_day(models: Models) -> bool:
    """Whether a chat template that prints the data asks for the time."""
    tokenizers = [one for one in (models.tokenizer, models.teacher_tokenizer) if one is not None]
    return any(prints_day(one) for one in tokenizers if one.chat_template)


def _already_finished(claim: Claim, summary: dict[str, Any]) -> str:
    steps = summary.get("steps")
    after = f" after {steps:,} steps" if isinstance(steps, int) else ""
    told = f"the run in {claim.folder} is already finished{after}: nothing of it is trained again"
    if claim.sender is not None or not cut_rounds.is_one_run(claim.config):  # _extend refuses these
        return told
    return f"{told}; to train longer: {run_folder.resume_longer(claim.folder)}"


def _train(
    run: Run,
    state: RunState,
    vocabularies: Mapping[str, str],
    saved: Saved | None,
    mark: Mark | None,
    stop: Stop,
    changed: Collection[str],
) -> Generator[Step, None, Result]:
    """Train from the present state to the end, then write the results. `changed` are inputs that are others now."""
    state.between_batches = stop.check_loading
    state.before = _before(run, state) if saved is None else dict(saved.scalars["before"])
    if not {"teacher", "eval"}.isdisjoint(changed):  # the summary describes the teacher that is here
        state.before |= _teacher_before(run, state)
    if saved is None:
        has_gates = bool(run.teacher.training.trained_weights())
        with run.stages.stage("measuring the teacher's gates") if has_gates else contextlib.nullcontext():
            run.teacher.training.begin_run()  # before the initial state is kept: the probe's result is part of it
        first_forward(run, state, vocabularies)
        find_micro_batch(run, state)
        find_loss_scale(run, state)
    if run.config.guard.on_exhausted == "reset" and state.applied == 0:
        state.initial = state_to_return_to(run, state).copied(disk=run.disk_copies)
    stop.check_loading()
    if mark is not None:
        restore_history(run, state, mark)
        run.log.write("note", text=f"the rollback to step {mark.to} was cut short: its budgets are kept")
    run.checkpoints.line = state.rollbacks
    return_unused_memory()
    if mark is not None and saved is not None:
        save_checkpoint(run, state, is_awaited=True)
    with contextlib.closing(training(run, state, stop)) as taken:
        for outcome in taken:
            yield Step(outcome, run, state, stop)
    return finish(run, state, stop)


def _before(run: Run, state: RunState) -> dict[str, Any]:
    """Evaluate the teacher and the untrained student on the held-out text, in one pass where that gives both."""
    before: dict[str, Any] = {}

    def tell_teacher(own: Evaluation | None) -> None:
        before.update(_teacher_before(run, state, own))

    if run.teacher.as_model() is None or run.teacher.original is not run.teacher:  # it answers otherwise than it is
        tell_teacher(None)
        student = run_evaluation(run, state)
    else:
        student = run_evaluation(run, state, on_teacher=tell_teacher)
    if not _is_number(student.perplexity) or student.unscored_tokens:
        raise BrokenAtStart(
            "the student's held-out loss is not finite before training",
            where=run.config.student.model,
            advice=["check the model folder", "or start from random weights: --set student.init=random"],
        )
    before["student_before"] = {**summary_row(student, run.num_student_parameters), "objective": student.objective}
    _check_selected(run, student)
    judge_student(run, state, student)  # the student before training is a candidate for the best
    notes = doubts(run, student)
    if run.config.student.init == "shrink":
        teacher_perplexity = before["teacher"]["perplexity"] if "teacher" in before else None
        wanted = run.config.student.shrink
        notes = [*notes, start_note(wanted, student.perplexity, run.student.vocab_size, teacher_perplexity)]
    for text in notes:
        run.log.write("note", text=text)
    return before


def _check_selected(run: Run, student: Evaluation) -> None:
    """Raise if the untrained student cannot be measured by `eval.select`: no later one could be compared with it."""
    if student.select != "perplexity" and student.selected is None:
        raise BrokenAtStart(
            f"the student before training has no finite {student.select} on the held-out data",
            where="eval.select",
            advice=["own_kl needs a teacher whose weights are here and that reads the student's tokens"],
        )


def _teacher_before(run: Run, state: RunState, own: Evaluation | None = None) -> dict[str, Any]:
    """The teacher's row; empty without one. `own` are its scores on the held-out text, where they are known."""
    before: dict[str, Any] = {}
    teacher = run.teacher.as_model()
    if teacher is not None:
        row = summary_row(own or _evaluate_teacher(run, state, teacher), teacher.num_parameters)
        before["teacher"] = run.teacher.comparable(row)
        if not _is_number(before["teacher"]["bits_per_byte"]):
            raise BrokenAtStart(
                "the teacher's held-out loss is not finite",
                where=run.config.teacher.model,
                advice=not_finite_advice(teacher_dtype(run.config.teacher.dtype, run.device)),
            )
    elif (stored := run.teacher.own_metrics(run.eval_batches())) is not None:
        before["teacher"] = stored
    if "teacher" in before:
        run.log.write("teacher_eval", **before["teacher"])
    return before


def _evaluate_teacher(run: Run, state: RunState, model: Student) -> Evaluation:
    compared = run.teacher if run.teacher.tokenizer is None else None
    options: dict[str, Any] = {"precision": run.precision.plain(), "between": state.between_batches}
    options |= {"teacher": compared, "stage": "evaluating the teacher"}
    with run.teacher.at_work():
        return evaluate_held_out(run, state, model, read=run.teacher.own_batch, **options)


def _is_number(value: float) -> bool:
    return value == value and value not in (float("inf"), float("-inf"))


def _announce(
    run: Run,
    models: Models,
    notes: tuple[str, ...],
    saved: Saved | None,
    check: InputCheck,
    setup_seconds: float,
) -> None:
    config = run.config
    teacher = models.loaded_student if models.source.is_student else models.loaded_teacher
    run.log.write(
        "run_start",
        run=run.folder.name,
        setup_seconds=round(setup_seconds, 3),
        stages=dict(run.stages.seconds),
        config=config.to_dict(),
        versions=run_folder.versions(),
        machine=run_folder.machine(),
        precision={
            "mode": run.precision.mode,
            "reason": run.precision.reason,
            "gflops": {name: round(rate, 1) for name, rate in models.facts.rates.items()} if models.facts else {},
        },
        schedule={
            "total_batches": run.loader.num_batches,
            "gradient_accumulation": config.train.gradient_accumulation_steps,
            "processes": run.parallel.size,
            "strategy": run.parallel.strategy,
            "copies": run.parallel.num_copies,
            "optimizer_steps": run.schedule.num_steps,
            "warmup_steps": run.schedule.num_warmup,
            "learning_rate": config.train.learning_rate,
            "eval_steps": run.budget.eval_steps,
            "eval_batches": run.budget.num_batches,
        },
        teacher={"name": config.teacher.model, **teacher.anatomy.to_dict()} if teacher else None,
        student={"name": student_name(config), **models.loaded_student.anatomy.to_dict(), "trained": run.num_trained},
        data={
            **run.corpus.counters,
            "shapes": run.corpus.shapes,
            "lengths": row_lengths(run.corpus),
            "notes": list(run.corpus.notes),
            "details": [note for note in run.corpus.notes if isinstance(note, Detail)],
        },
    )
    notes = (*notes, *unused_strategy(config, run.parallel))
    details = map(Detail, (*run.mix.notes(run.device.type), *describe_update(run.optimizer)))
    notes = (*notes, *models.notes, *run.teacher.notes, *details)
    of_rollouts = run.rollouts.notes if run.rollouts is not None else ()
    for text in (*notes, *of_rollouts, *([run.budget.note] if run.budget.note else [])):
        run.log.write("note", text=text)
    if saved is not None:
        for reason in saved.rejected:
            run.log.write("note", text=f"a checkpoint was not used: {reason}")
        run.log.write("resume", step=saved.step)
        for text in (check.note, moved_device(saved, run), moved_processes(saved, run)):
            if text:
                run.log.write("note", text=text)
        if check.changes:
            run.log.write("changed_inputs", step=saved.step, changes=check.changes)
