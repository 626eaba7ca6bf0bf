"""The end of a run: choose the student that is kept, judge it, write it and the summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from stillroom.doctor.checks import success_checks
from stillroom.engine.adviser import advice_of
from stillroom.engine.by_source import source_rows
from stillroom.engine.ending.outcome import DONE, how_it_ended
from stillroom.engine.ending.read_again import SUMMARY, read_again, refuse_changed
from stillroom.engine.ending.result import Result
from stillroom.engine.ending.samples import make_samples
from stillroom.engine.ending.tokens import save_tokens, view_of_all
from stillroom.engine.fitting import evaluate_held_out, micro_batch_rows
from stillroom.engine.run import Run
from stillroom.engine.saving import gather_student, load_best, save_student, whole_again
from stillroom.engine.state import RunState
from stillroom.engine.stop import Stop
from stillroom.errors import CannotSave, Interrupted, NoBetterStudent, StudentDiffers
from stillroom.evaluation import Evaluation
from stillroom.files import reason_of, write_atomically
from stillroom.telemetry.events import Event, scan_events
from stillroom.telemetry.strict import strict
from stillroom.telemetry.wording import as_number


def finish(run: Run, state: RunState, stop: Stop) -> Result:
    """Evaluate the best student, and write it with the summary and the last events."""

    def check_stop() -> None:
        if run.parallel.any_of(bool(stop.reason)):
            raise Interrupted(
                f"stopped after the last step, before the result was written: {stop.reason or 'as another process'}",
                where=str(run.folder),
                advice=[f"nothing is trained again: stillroom resume {run.folder}"],
            )

    # A best student from before a rollback may have the number of the last step and other weights.
    is_last_best = state.best_step == state.applied and state.evaluations_since_best == 0
    if not is_last_best:
        load_best(run, state)
        whose = f"that of step {state.best_step}" if state.best_step else "the one before training"
        run.log.write("note", text=f"the best student is {whose}, and it is the one kept")
    # Compare with the teacher as it was given: trained gates would move the yardstick.
    reference = run.teacher.original
    final = state.evaluated if is_last_best and reference is run.teacher else None
    if final is None:
        options: dict[str, Any] = {"precision": run.precision, "teacher": reference, "between": check_stop}
        final = evaluate_held_out(run, state, run.student, **options)
    check_stop()
    end = how_it_ended(state, final.perplexity, state.before["student_before"]["perplexity"])
    gather_student(run)
    tokens = view_of_all(run)
    if not run.parallel.is_first:
        return Result(run.folder, dict(end))
    save_student(run)
    found = read_again(run)
    run = whole_again(run)
    run.teacher.training.save(run.folder)
    save_tokens(run, tokens)
    for sample in make_samples(run):
        run.log.write("sample", **sample)
    run.check_folder()  # its log is read again
    summary = {**_summary(run, state, end, final, stop), **found}
    write_summary(run.folder, summary)
    if not any(one["severity"] != "hint" for one in summary["advice"]):  # else the advice of the diagnosis says it
        for text in end["advice"]:
            run.log.write("note", text=text)
    is_changed = not found.get(SUMMARY, {}).get("is_equal", True)
    code = NoBetterStudent.exit_code if end["status"] != DONE else StudentDiffers.exit_code if is_changed else 0
    reason = {"reason": end["reason"]} if end["reason"] else {}
    times = {"seconds": state.seconds, "total_seconds": summary["total_seconds"]}
    run.log.write("run_end", status=end["status"], steps=state.applied, **times, exit_code=code, **reason)
    return Result(run.folder, summary)


def _summary(run: Run, state: RunState, end: dict[str, Any], final: Evaluation, stop: Stop) -> dict[str, Any]:
    """The contents of summary.json."""
    events = scan_events(run.log.path).records
    summary = {
        **end,
        "steps": state.applied,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
        "total_seconds": round(earlier_seconds(events) + stop.seconds, 3),
        "success_rate": state.success_rate,
        "skipped": state.skipped,
        "retried": state.retried,
        "rollbacks": state.rollbacks,
        "label_taught_rows": label_taught_rows(events),
        "micro_batch_rows": micro_batch_rows(run, state),
        "shortages": state.shortages,
        "best_step": state.best_step,
        "precision": run.precision.mode,
        "trained_parameters": run.num_trained,
        "transfer_tokens": run.corpus.counters.get("train_tokens"),
        "learning_rate": run.config.train.learning_rate,
        "weight_decay": run.config.train.weight_decay,
        **state.before,
        "student": {**summary_row(final, run.num_student_parameters), "steps": state.applied, "tokens": state.tokens},
        **run.teacher.summary(),
    }
    if run.config.data.is_mixed:
        summary["sources"] = source_rows(run, state.cursor)
    if changed := [{"step": e["step"], "changes": e["changes"]} for e in events if e["event"] == "changed_inputs"]:
        summary["changed_inputs"] = changed
    summary["checks"] = _checks(run, summary, events)
    summary["advice"] = advice_of(events, summary, end["advice"])
    return summary


def label_taught_rows(events: Sequence[Event]) -> int:
    """Positions of the applied steps that were taught by their labels, for want of a usable teacher."""
    kept = {event.get("step"): event for event in events if event.get("event") == "step" and _is_kept(event)}
    return sum(int(as_number(event.get("bad_teacher_rows")) or 0) for event in kept.values())


def _is_kept(event: Event) -> bool:
    return event.get("verdict") == "keep"


def earlier_seconds(events: Sequence[Event]) -> float:
    """The time of the starts before this one, from the first moment to the last event; what a kill cut off is lost."""
    total, began, last = 0.0, None, None
    for event in events:
        moment = _moment(event)
        if event.get("event") == "run_start":
            if began is not None and last is not None:
                total += max(0.0, last - began)
            setup = as_number(event.get("setup_seconds")) or 0.0
            began, last = (None if moment is None else moment - setup), None
        elif moment is not None:
            last = moment
    return total


def _moment(event: Event) -> float | None:
    try:
        return datetime.fromisoformat(str(event.get("time"))).timestamp()
    except (ValueError, OverflowError):
        return None


def result_or_error(result: Result) -> Result:
    """The result; raise for a run that found no better student, or whose student was not written rightly."""
    if result.summary.get("status", DONE) == DONE:
        refuse_changed(result.folder, result.summary)
        return result
    raise NoBetterStudent(
        str(result.summary["reason"]),
        folder=result.folder,
        summary=result.summary,
        advice=[_sentence(one) for one in result.summary["advice"]][:_NUM_ADVICE],
    )


_NUM_ADVICE = 3  # more do not fit on the screen of an error


def _sentence(advice: Any) -> str:
    """Advice of a summary as a line; in processes but the first, and in older summaries, it is a text already."""
    return str(advice.get("advice") if isinstance(advice, dict) else advice)


def _checks(run: Run, summary: dict[str, Any], events: tuple[Event, ...]) -> list[dict[str, Any]]:
    """The success criteria, judged from the event log, which has all starts of a resumed run."""
    before = summary.get("student_before", {})
    return success_checks(
        events,
        perplexity=summary["student"]["perplexity"],
        perplexity_before=before.get("perplexity"),
        max_perplexity=run.config.eval.max_perplexity,
        min_share=run.config.eval.min_share,
        epoch_steps=run.loader.num_windows,
        vocab_size=run.student.vocab_size,
        bits={row: summary.get(row, {}).get("bits_per_byte") for row in ("student", "student_before", "teacher")},
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


def summary_row(result: Evaluation, num_parameters: int) -> dict[str, Any]:
    """What the summary says of a model."""
    return {**result.yardsticks(), "parameters": num_parameters}
