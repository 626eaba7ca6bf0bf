"""How a run ended before its last step: stalled, killed, stopped."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise

from stillroom.diagnosis.case import Case
from stillroom.diagnosis.cause import Cause
from stillroom.diagnosis.finding import Finding, Severity
from stillroom.telemetry.wording import as_number, clean, format_duration

_QUIET_SECONDS = 300.0
_CONTINUE = "continue: stillroom resume RUN"
_QUIET_FACTOR = 20.0  # times the longest silence so far


def _time_of(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


def _silence(case: Case) -> tuple[float, float] | None:
    """(seconds since the last event, longest silence between two events before)."""
    times = [time for event in case.record.events if (time := _time_of(event.get("time"))) is not None]
    if not times or case.now is None:
        return None
    gaps = [(after - before).total_seconds() for before, after in pairwise(times)]
    return (case.now - times[-1]).total_seconds(), max(gaps, default=0.0)


def _is_silent(case: Case) -> bool:
    silence = _silence(case)
    return silence is not None and silence[0] > max(_QUIET_SECONDS, _QUIET_FACTOR * silence[1])


def stalled_run(case: Case) -> Finding | None:
    """A process holds the folder and has written nothing for far longer than ever before."""
    silence = _silence(case)
    if case.record.end or not case.is_owned or silence is None or not _is_silent(case):
        return None
    others = (as_number(case.schedule.get("processes")) or 1) > 1
    last = case.record.events[-1].get("event") if case.record.events else "nothing"
    return Finding(
        "stalled_run",
        "problem",
        f"the last event ({clean(last)}) is {format_duration(silence[0])} old; the longest silence before was "
        f"{format_duration(silence[1])}, and a process still holds the folder",
        "end that process and continue: stillroom resume RUN"
        + ("; a run in several processes waits for the slowest at most train.peer_timeout_minutes" if others else ""),
        steps=(case.last_step,),
        setting="train.peer_timeout_minutes=5" if others else "",
        otherwise="end that process and continue: stillroom resume RUN",
        numbers={"silent_seconds": silence[0], "longest_before": silence[1]},
    )


def stopped_early(case: Case) -> Finding | None:
    """The run did not take all its steps."""
    end, planned = case.record.end, case.planned_steps
    done = case.last_step
    where = f"at step {done:,} of {planned:,}"
    if end.get("exit_code") and (done < planned or not planned):
        is_interrupted = end.get("exit_code") == 75
        severity: Severity = "warning" if is_interrupted else "problem"
        reason = clean(end.get("reason") or "no reason recorded")
        place = "" if reason.startswith("stopped at step") else f"stopped {where}: "
        what = f"{place}{reason} (exit code {end['exit_code']})"
        is_over = end.get("exit_code") in (20, 21, 22, 23)  # the same settings would end the same way
        advice = "change what the reason names and begin anew, with another --out" if is_over else _CONTINUE
        setting = "train.max_minutes=0" if "minutes" in str(end.get("reason")) else ""
    elif end and done < planned:
        severity, advice, setting = "warning", "for a longer run, wait for more evaluations", ""
        what = f"ended {where}: no better student in {case.number('train.early_stopping'):.0f} evaluations"
        setting = f"train.early_stopping={2 * int(case.number('train.early_stopping', 1))}"
    elif not end and case.record.events and case.is_owned is False:
        severity, advice, setting = "problem", _CONTINUE, ""
        what = f"the log ends {where} without an end: the process was killed or the machine went down"
    else:
        return None
    return Finding(
        "stopped_early",
        severity,
        what,
        advice,
        steps=(done,),
        setting=setting,
        numbers={"steps": done, "planned": planned, "exit_code": end.get("exit_code")},
    )


CAUSES = (
    Cause(stalled_run, is_live=False),
    Cause(stopped_early, is_live=False),
)
