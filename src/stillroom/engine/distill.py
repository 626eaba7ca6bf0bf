"""The main job: build or resume a run, train it, and leave everything a person needs in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stillroom import threads
from stillroom.checkpoint import Mark, Saved
from stillroom.config import Config
from stillroom.engine.building.assemble import build_run
from stillroom.engine.building.device import find_device
from stillroom.engine.building.loss_scale import find_loss_scale
from stillroom.engine.building.models import Models, load_models
from stillroom.engine.building.preflight import first_forward
from stillroom.engine.building.shrink_student import student_name, told_of_start
from stillroom.engine.ending.outcome import DONE, FINISHED, doubts, how_it_ended
from stillroom.engine.ending.result import Result
from stillroom.engine.ending.samples import make_samples
from stillroom.engine.ending.success_checks import success_checks
from stillroom.engine.loop import judge_student, run_evaluation, training
from stillroom.engine.recovery.recover import state_to_return_to
from stillroom.engine.resume import newest_state, open_log, put_back, recorded_end
from stillroom.engine.run import Run
from stillroom.engine.run_folder import folder as run_folder
from stillroom.engine.run_folder.folder import Claim
from stillroom.engine.run_folder.inputs import Inputs
from stillroom.engine.saving import load_best, save_checkpoint, save_student
from stillroom.engine.state import RunState, recall
from stillroom.engine.stop import Stop
from stillroom.errors import BrokenAtStart, CannotSave, Interrupted, NoBetterStudent
from stillroom.evaluation import Evaluation, evaluate
from stillroom.files import reason_of, write_atomically
from stillroom.models import Student, anatomy_of
from stillroom.parallel import Parallel, join
from stillroom.telemetry import SilentLog
from stillroom.telemetry.events import scan_events
from stillroom.telemetry.strict import strict

__all__ = ["Result", "distill", "resume"]


def distill(
    config: Config,
    out: str | Path,
    *,
    device: str = "auto",
    inject: str = "",
    listeners: tuple[Callable[[dict[str, Any]], None], ...] = (),
    notes: tuple[str, ...] = (),
    inputs: Inputs | None = None,
) -> Result:
    """Distil as configured into a folder. A folder with an unfinished run of the same configuration is resumed.

    `inputs` are the objects that `inputs.settings(out)` in the configuration name: the first process writes them there.
    """
    stop = Stop(config.train.max_minutes)
    with stop.on_signals():
        with stop.while_loading():
            parallel = join(config.train.peer_timeout_minutes)
            where = find_device(device)
        with run_folder.owned(Path(out), config, is_first=parallel.is_first) as claim:
            if parallel.broadcast(float(claim.is_resumed)) and not parallel.is_first:
                claim.is_resumed, claim.config = run_folder.look(claim.folder, config)
            if inputs is not None:
                with stop.while_loading():
                    kept = inputs.keep(claim.folder, is_resumed=claim.is_resumed) if parallel.is_first else ()
                    parallel.wait()
                notes = (*notes, *kept)
            finished, doubt = run_folder.read_summary(claim.folder) if claim.is_resumed else ({}, "")
            if finished.get("status") in FINISHED:
                return answered(Result(claim.folder, finished))
            return answered(_run(claim, parallel, where, stop, inject, listeners, (*notes, doubt) if doubt else notes))


def _run(
    claim: Claim,
    parallel: Parallel,
    where: torch.device,
    stop: Stop,
    inject: str,
    listeners: tuple[Callable[[dict[str, Any]], None], ...],
    notes: tuple[str, ...],
) -> Result:
    """From a claimed folder to the result: load, build, train, finish."""
    folder, config = claim.folder, claim.config
    saved, mark = newest_state(folder, config, parallel) if claim.is_resumed else (None, None)
    with stop.while_loading():
        models = load_models(config, where, folder=folder, parallel=parallel, tell=_teller(listeners))
    if parallel.is_first and not claim.is_resumed:
        claim.describe()
    log = open_log(folder, saved, mark) if parallel.is_first else SilentLog()
    for listener in listeners:
        log.listen(listener)
    with log, recorded_end(log, folder):
        with stop.while_loading():
            run = build_run(
                config, folder, log, device=where, models=models, inject=inject, parallel=parallel, lock=claim.lock
            )
        claim.is_begun = True
        state = RunState()
        _announce(run, models, notes, saved)
        if saved is not None:
            put_back(run, state, saved)
        return _carry(run, state, saved, mark, stop)


def resume(
    folder: str | Path,
    *,
    device: str = "auto",
    max_minutes: float | None = None,
    listeners: tuple[Callable[[dict[str, Any]], None], ...] = (),
) -> Result:
    """Continue the run in a folder, bit for bit; a finished run is simply returned."""
    config = run_folder.read_config(Path(folder))
    if max_minutes is not None:
        config = config.model_copy(update={"train": config.train.model_copy(update={"max_minutes": max_minutes})})
    return distill(config, folder, device=device, listeners=listeners)


def _teller(listeners: tuple[Callable[[dict[str, Any]], None], ...]) -> Callable[[str], None]:
    """For what takes long before there is a log."""

    def tell(text: str) -> None:
        for listener in listeners:
            listener({"event": "note", "text": text})

    return tell


def _carry(run: Run, state: RunState, saved: Saved | None, mark: Mark | None, stop: Stop) -> Result:
    """Train from where the state stands to the end, then write what is left to write."""
    state.between_batches = stop.check_loading
    state.before = _before(run, state) if saved is None else dict(saved.scalars["before"])
    if saved is None:
        run.teacher.begin_run()  # before the initial state is kept: what the probes found is part of it
        first_forward(run, state)
        find_loss_scale(run, state)
    if run.config.guard.on_exhausted == "reset" and state.applied == 0:
        state.initial = state_to_return_to(run, state).copied()
    stop.check_loading()
    if mark is not None:
        recall(run, state, mark)
        run.log.write("note", text=f"the rollback to step {mark.to} was cut short: its budgets are kept")
    run.checkpoints.line = state.rollbacks
    if mark is not None and saved is not None:
        save_checkpoint(run, state)
    for _outcome in training(run, state, stop):
        pass
    return _finish(run, state, stop)


def _before(run: Run, state: RunState) -> dict[str, Any]:
    """Teacher and untrained student on the held-out text, before anything is changed."""
    found: dict[str, Any] = {}
    teacher = run.teacher.as_model()
    if teacher is not None:
        found["teacher"] = _row(_evaluate_teacher(run, state, teacher), teacher.model)
        if not _is_number(found["teacher"]["perplexity"]):
            raise BrokenAtStart(
                "the teacher's held-out loss is not finite",
                where=run.config.teacher.model,
                advice=["load it in float32: --set teacher.dtype=float32", "check the model folder"],
            )
    student = run_evaluation(run, state)
    if not _is_number(student.perplexity) or student.unscored_tokens:
        raise BrokenAtStart(
            "the student's held-out loss is not finite before training",
            where=run.config.student.model,
            advice=["check the model folder", "or start from random weights: --set student.init=random"],
        )
    found["student_before"] = _row(student, run.student.model)
    judge_student(run, state, student)  # what training must beat: nothing worse is ever handed out
    notes = doubts(run, student.perplexity)
    if run.config.student.init == "shrink":
        teacher_perplexity = found["teacher"]["perplexity"] if "teacher" in found else None
        wanted = run.config.student.shrink
        notes = [*notes, told_of_start(wanted, student.perplexity, run.student.vocab_size, teacher_perplexity)]
    for text in notes:
        run.log.write("note", text=text)
    return found


def _evaluate_teacher(run: Run, state: RunState, model: Student) -> Evaluation:
    batches, plain = run.eval_batches(), run.precision.plain()
    with run.teacher.at_work():
        return evaluate(model, batches, precision=plain, teacher=run.teacher, between=state.between_batches)


def _is_number(value: float) -> bool:
    return value == value and value not in (float("inf"), float("-inf"))


def _row(result: Evaluation, model: Any) -> dict[str, Any]:
    return {**result.yardsticks(), "parameters": anatomy_of(model).num_parameters}


def _announce(run: Run, models: Models, notes: tuple[str, ...], saved: Saved | None) -> None:
    config = run.config
    run.log.write(
        "run_start",
        run=run.folder.name,
        config=config.to_dict(),
        versions=run_folder.versions(),
        machine=run_folder.machine(),
        precision={"mode": run.precision.mode, "reason": run.precision.reason},
        schedule={
            "total_batches": run.loader.num_batches,
            "gradient_accumulation": config.train.gradient_accumulation_steps,
            "processes": run.parallel.size,
            "optimizer_steps": run.schedule.num_steps,
            "warmup_steps": run.schedule.num_warmup,
            "learning_rate": config.train.learning_rate,
        },
        teacher={"name": config.teacher.model, **anatomy_of(models.teacher).to_dict()} if models.teacher else None,
        student={"name": student_name(config), **anatomy_of(models.student).to_dict()},
        data={**run.corpus.counters, "notes": list(run.corpus.notes)},
    )
    for text in (*notes, *threads.notes(), *models.notes, *run.teacher.notes, *run.mix.notes(run.device.type)):
        run.log.write("note", text=text)
    if saved is not None:
        for reason in saved.rejected:
            run.log.write("note", text=f"a checkpoint was not used: {reason}")
        run.log.write("resume", step=saved.step)


# -- the end ---------------------------------------------------------------------------------------------


def _finish(run: Run, state: RunState, stop: Stop) -> Result:
    def ask() -> None:
        if run.parallel.any_of(bool(stop.reason)):
            raise Interrupted(
                f"stopped after the last step, before the result was written: {stop.reason or 'as another process'}",
                where=str(run.folder),
                advice=[f"nothing is trained again: stillroom resume {run.folder}"],
            )

    # The best of a stretch that was rolled back may bear the number of the last step and be another student.
    is_last_best = state.best_step == state.applied and state.evaluations_since_best == 0
    if not is_last_best:
        load_best(run, state)
        whose = f"that of step {state.best_step}" if state.best_step else "the one before training"
        run.log.write("note", text=f"the best student is {whose}, and it is the one kept")
    # A teacher whose gates were trained is no yardstick: the result is compared with the one that was given.
    reference = run.teacher.original
    final = state.evaluated if is_last_best and reference is run.teacher else None
    if final is None:
        final = evaluate(run.student, run.eval_batches(), precision=run.precision, teacher=reference, between=ask)
    ask()
    end = how_it_ended(state, final.perplexity, state.before["student_before"]["perplexity"])
    if not run.parallel.is_first:
        return Result(run.folder, dict(end))
    save_student(run)
    run.teacher.save(run.folder)
    for sample in make_samples(run):
        run.log.write("sample", **sample)
    summary = {
        **end,
        "steps": state.applied,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
        "success_rate": state.success_rate,
        "skipped": state.skipped,
        "retried": state.retried,
        "rollbacks": state.rollbacks,
        "best_step": state.best_step,
        "precision": run.precision.mode,
        "transfer_tokens": run.corpus.counters.get("train_tokens"),
        "learning_rate": run.config.train.learning_rate,
        "weight_decay": run.config.train.weight_decay,
        **state.before,
        "student": {**_row(final, run.student.model), "steps": state.applied, "tokens": state.tokens},
        **run.teacher.summary(),
    }
    summary["checks"] = _checks(run, summary)
    write_summary(run.folder, summary)
    for text in summary["advice"]:
        run.log.write("note", text=text)
    code = 0 if end["status"] == DONE else NoBetterStudent.exit_code
    reason = {"reason": end["reason"]} if end["reason"] else {}
    run.log.write("run_end", status=end["status"], steps=state.applied, seconds=state.seconds, exit_code=code, **reason)
    return Result(run.folder, summary)


def answered(result: Result) -> Result:
    """The result, or the error of a run that went through all its steps and left no better student."""
    if result.summary.get("status", DONE) == DONE:
        return result
    raise NoBetterStudent(
        str(result.summary["reason"]),
        folder=result.folder,
        summary=result.summary,
        advice=[str(text) for text in result.summary["advice"]],
    )


def _checks(run: Run, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The success criteria, judged by the run's own record: a resumed run has its beginning there too."""
    before = summary.get("student_before", {})
    return success_checks(
        scan_events(run.log.path).records,
        perplexity=summary["student"]["perplexity"],
        perplexity_before=before.get("perplexity"),
        max_perplexity=run.config.eval.max_perplexity,
        min_share=run.config.eval.min_share,
        epoch_steps=run.loader.num_windows,
        vocab_size=run.student.vocab_size,
    )


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    contents = json.dumps(strict(summary), indent=1, allow_nan=False).encode("utf-8")
    try:
        write_atomically(folder / "summary.json", contents)
    except OSError as error:
        raise CannotSave(
            f"cannot write the summary: {reason_of(error)}",
            where=str(folder / "summary.json"),
            advice=[
                "free some space on that disk",
                f"then continue, nothing is trained again: stillroom resume {folder}",
            ],
        ) from error
