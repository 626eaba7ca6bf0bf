"""Diagnose the record of a run, and compare two: findings in order, as text of at most 80 columns, and as JSON.

The gravest finding is first, and a root stands before what follows from it. Advice is checked against the run: what it
had already, or what --inject did to it on purpose, is not advised away.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stillroom.core.errors import ConfigError
from stillroom.doctor.log_rules import Case
from stillroom.doctor.rules import SEVERITIES, Finding, judge_settings, rules_for
from stillroom.telemetry.record import LoggedRun
from stillroom.telemetry.wording import (
    as_number,
    clean,
    format_count,
    format_duration,
    format_percent,
    format_result,
    items,
    reading,
    section,
    show,
)
from stillroom.telemetry.wording import section as mapping

FILES = ("events.jsonl", "config.json", "summary.json")
WIDTH = 80


def read_case(folder: Path, *, is_owned: bool | None = None) -> Case:
    """Read the record of a run. Raise where nothing of it can be read; `record.missing` says what is lacking."""
    if not any((folder / name).exists() for name in FILES):
        held = f"it has none of {', '.join(FILES)}" if folder.is_dir() else "there is no such folder"
        raise ConfigError(
            f"{folder} is not a Stillroom run folder: {held}", advice=["give the folder of a run, or a configuration"]
        )
    record = LoggedRun.load(folder)
    if not record.events and not record.config and not record.summary:
        raise ConfigError(
            f"nothing of the run in {folder} can be read: {' '.join(record.missing)}",
            advice=["restore the files from a copy"],
        )
    return Case(record, now=datetime.now(UTC), is_owned=is_owned)


# -- findings in order -----------------------------------------------------------------------------------

_TEACHERS_FAULTS = frozenset({"teacher_nan", "teacher_garbage", "router_nan"})
_FAULTS = _TEACHERS_FAULTS | {
    "nan_weight", "nan_embedding", "huge_weight", "inf_logit", "bad_batch", "all_masked", "inf_grad", "nan_grad",
    "nan_moment", "lr_spike", "oom",
}  # fmt: skip
_ENDS = frozenset({"kill", "disk_full", "freeze"})
# What --inject can provoke, and by which faults.
_PROVOKED = {
    "divergence": _FAULTS,
    "refused_batches": _FAULTS,
    "rate_too_high": _FAULTS,
    "loss_scale_collapsed": _FAULTS,
    "teacher_degraded": _TEACHERS_FAULTS,
    "masked_out_data": frozenset({"all_masked"}),
    "stopped_early": _FAULTS | _ENDS,
    "stalled_run": _ENDS,
}
_AFTERMATH = 8  # steps after a fault that it may still be the cause of: the state is looked at after 1, 2, 4, 8 ...


def diagnose(case: Case) -> list[Finding]:
    """The findings of a run, the most likely root cause first. Harmful settings come last, as hints.

    A run that asks about itself is told what is worth saying while it continues, and nothing about its settings.
    """
    asked = [rule for rule in rules_for("log") if rule.is_live or not case.is_live]
    findings = _ordered({rule.name: _fitting(case, finding) for rule in asked for finding in rule.find(case)})
    if case.is_live:
        return findings
    named = {_key(finding) for finding in findings} - {""}
    judged = [rule.judge for rule in rules_for("log")]
    hints = [replace(one, severity="hint") for one in judge_settings(case, without=judged)]
    return findings + [hint for hint in hints if _key(hint) not in named]


def _key(finding: Finding) -> str:
    return finding.setting.partition("=")[0]


def _fitting(case: Case, finding: Finding) -> Finding:
    """The finding with advice that can be right for this run."""
    struck = _strikes(case, finding)
    if struck:
        names = ", ".join(dict.fromkeys(f"{name} at step {step:,}" for name, step in struck[:3]))
        told = f"nothing to change: --inject struck {names}; a run without it shows whether anything else is wrong"
        return replace(finding, advice=told, setting="")
    if finding.setting and case.has(finding.setting):
        return replace(finding, advice=finding.otherwise or f"{finding.setting} was not enough", setting="")
    return finding


def _strikes(case: Case, finding: Finding) -> list[tuple[str, int]]:
    """The injected faults that account for all steps of a finding; none where a step is left over."""
    faults = _PROVOKED.get(finding.cause, frozenset())
    strikes = [(name, step) for name, step in case.injected if name in faults or name.partition("_")[0] in faults]

    def is_of(step: int) -> bool:
        return any(-1 <= step - at <= _AFTERMATH for _, at in strikes)

    steps = finding.steps if finding.cause != "rate_too_high" else finding.steps[-1:]
    return strikes if all(is_of(step) for step in steps) else []


def _ordered(found: dict[str, Finding]) -> list[Finding]:
    """By gravity, then roots before what they explain, then by the order of the rules.

    A cause is as grave as the gravest finding that follows from it.
    """
    gravity = {name: SEVERITIES.index(finding.severity) for name, finding in found.items()}
    explained: set[str] = set()
    rules = [rule for rule in rules_for("log") if rule.name in found]
    for rule in rules:
        gravity[rule.name] = min([gravity[rule.name], *(gravity[name] for name in rule.explains if name in found)])
        explained |= set(rule.explains)
    ranks = {rule.name: rank for rank, rule in enumerate(rules)}
    own = {name for name, finding in found.items() if finding.is_root}
    order = sorted(found, key=lambda name: (gravity[name], name not in own, name in explained, ranks[name]))
    return [replace(found[name], severity=SEVERITIES[gravity[name]]) for name in order]


# -- as text ---------------------------------------------------------------------------------------------

_LABEL = 9


def words(cause: str) -> str:
    """`rate_too_high` -> `rate too high`."""
    return clean(cause.replace("_", " "))


def step_words(steps: Sequence[int]) -> str:
    """`step 4`, `steps 4, 9`; empty where a finding is about the run as a whole."""
    if not steps or tuple(steps) == (0,):
        return "before the first step" if steps else ""
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(f"{step:,}" for step in steps)


def finding_lines(number: int, finding: Finding) -> list[str]:
    where = step_words(finding.steps)
    head = f"{number}. {finding.severity}  {words(finding.cause)}" + (f"  ({where})" if where else "")
    lines = [head, *labelled("evidence", finding.evidence), *labelled("advice", finding.advice)]
    # Not wrapped: a line break inside the quotes would not be the same setting.
    return [*lines, f"   {'setting':<{_LABEL}}--set '{clean(finding.setting)}'"] if finding.setting else lines


def labelled(label: str, text: str) -> list[str]:
    parts = textwrap.wrap(
        clean(text), WIDTH - _LABEL - 3, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return [f"   {label if place == 0 else '':<{_LABEL}}{part}" for place, part in enumerate(parts or [""])]


def run_lines(case: Case, findings: Sequence[Finding]) -> list[str]:
    """What `stillroom diagnose RUN` prints."""
    record = case.record
    lines = [f"run       {clean(record.name)}", f"state     {state_of(case)}"]
    results = [
        f"{label} {show(row, 'perplexity', format_result)}"
        for label, row in (
            ("teacher", record.result("teacher")),
            ("before", record.result("student_before")),
            ("student", record.result("student")),
        )
        if row
    ]
    lines += [f"result    perplexity: {', '.join(results)}"] if results else []
    for sentence in record.missing:
        lines += [f"{'missing' if part == 0 else '':<10}{text}" for part, text in enumerate(_wrapped(sentence))]
    return [*lines, "", *_finding_list(findings)]


def config_lines(name: str, findings: Sequence[Finding]) -> list[str]:
    """What `stillroom diagnose CONFIG` prints."""
    return [f"config    {clean(name)}", "", *_finding_list(findings)]


def _finding_list(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["nothing found that harms this run"]
    lines: list[str] = []
    for number, finding in enumerate(findings, start=1):
        lines += [*finding_lines(number, finding), ""]
    alarming = sum(finding.is_alarming for finding in findings)
    order = "; the most likely root is first" if len(findings) > 1 else ""
    return [*lines, f"{len(findings)} found, {alarming or 'none'} of them more than a hint{order}"]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(clean(text), WIDTH - 10, break_long_words=False, break_on_hyphens=False) or [""]


def state_of(case: Case) -> str:
    """How far the run is, in words."""
    done, planned, end = case.last_step, case.planned_steps, case.record.end
    place = f"step {done:,} of {planned:,}" if planned else f"step {done:,}"
    if end:
        return f"{clean(end.get('status') or 'ended')}, {place}, exit code {clean(end.get('exit_code', '-'))}"
    if case.is_owned:
        return f"a process works on it, {place}"
    if not case.record.events:
        return "unknown: there are no events"
    return f"not ended, {place}" + ("; no process works on it" if case.is_owned is False else "")


def as_dict(case: Case, findings: Sequence[Finding]) -> dict[str, Any]:
    """What `stillroom diagnose RUN --json` prints."""
    return {
        "run": case.record.name,
        "state": state_of(case),
        "missing": list(case.record.missing),
        "findings": [finding.to_dict() for finding in findings],
    }


# -- two runs --------------------------------------------------------------------------------------------

METRICS = (
    ("perplexity", "perplexity", format_result, True),
    ("bits_per_byte", "bits/byte", format_result, True),
    ("kl", "kl", format_result, True),
    ("agreement", "agreement", format_percent, False),
)  # key, label, form, whether less is better
_AGAINST_TEACHER = ("kl", "agreement")
ROWS = (("teacher", "teacher"), ("student_before", "student before"), ("student", "student"))
COUNTS = (
    ("steps", format_count),
    ("tokens", format_count),
    ("seconds", format_duration),
    ("skipped", format_count),
    ("rollbacks", format_count),
    ("success_rate", format_percent),
)


def compare(first: LoggedRun, second: LoggedRun) -> dict[str, Any]:
    """The differing settings, versions and counts, and each metric of each model side by side."""
    is_alike = _is_alike(first, second)
    return {
        "runs": [first.name, second.name],
        "missing": [list(first.missing), list(second.missing)],
        "settings": _differing(first.config, second.config),
        "surroundings": _differing(
            {key: mapping(first.start, key) for key in ("versions", "machine", "precision")},
            {key: mapping(second.start, key) for key in ("versions", "machine", "precision")},
        ),
        "held_out_alike": is_alike,
        "status": [first.summary.get("status"), second.summary.get("status")],
        "counts": _differing(
            *({key: run.summary.get(key) for key, _ in COUNTS} for run in (first, second)),
        ),
        "results": {
            row: {
                key: _side_by_side(first.result(row), second.result(row), key, less, is_alike)
                for key, _, _, less in METRICS
                if row != "teacher" or key not in _AGAINST_TEACHER
            }
            for row, _ in ROWS
        },
    }


def _flat(table: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(table, Mapping) or not table:
        return {prefix: table}
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat.update(_flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The keys whose values differ, with both; None where a run has no such key."""
    before, after = _flat(first), _flat(second)
    keys = sorted(before.keys() | after.keys())
    return {key: [before.get(key), after.get(key)] for key in keys if key and before.get(key) != after.get(key)}


def _is_alike(first: LoggedRun, second: LoggedRun) -> bool | None:
    """Whether both were scored on as many held-out tokens of as many documents; None where a log does not say."""
    counts = [
        tuple(as_number(mapping(run.start, "data").get(key)) for key in ("eval_tokens", "eval_documents"))
        + tuple(as_number(event.get("tokens")) for event in run.evals[-1:])
        for run in (first, second)
    ]
    return None if any(None in one for one in counts) else counts[0] == counts[1]


def _side_by_side(
    first: Mapping[str, Any], second: Mapping[str, Any], key: str, less_is_better: bool, is_alike: bool | None
) -> dict[str, Any]:
    values = [reading(row, key) for row in (first, second)]
    bounds = [_interval(row, key) for row in (first, second)]
    found: dict[str, Any] = {"values": values, "intervals": bounds, "verdict": "unknown"}
    if values[0] is None or values[1] is None or is_alike is False:
        return found
    found["difference"] = values[1] - values[0]
    if values[0] == values[1]:
        found["verdict"] = "equal"
    elif bounds[0] is None or bounds[1] is None:
        found["verdict"] = "no interval"
    elif bounds[0][0] <= bounds[1][1] and bounds[1][0] <= bounds[0][1]:
        found["verdict"] = "intervals overlap"
    else:
        found["verdict"] = "second better" if (values[1] < values[0]) == less_is_better else "first better"
    return found


def _interval(row: Mapping[str, Any], key: str) -> list[float] | None:
    bounds = [as_number(bound) for bound in items(section(row, "intervals"), key)]
    if len(bounds) != 2 or bounds[0] is None or bounds[1] is None:
        return None
    return [bounds[0], bounds[1]]


# -- as text ---------------------------------------------------------------------------------------------


def compare_lines(found: Mapping[str, Any]) -> list[str]:
    """What `stillroom compare RUN RUN` prints, in at most 80 columns where names and values are short."""
    lines = [f"first     {clean(found['runs'][0])}", f"second    {clean(found['runs'][1])}"]
    for name, sentences in zip(("first", "second"), found["missing"], strict=True):
        lines += [f"missing   {name}: {clean(sentence)}" for sentence in sentences]
    lines += ["", *_table("settings that differ", found["settings"], "no setting differs")]
    if found["surroundings"]:
        lines += ["", *_table("surroundings that differ", found["surroundings"], "")]
    lines += ["", *_table("course of the runs", _told(found), "steps, tokens and refusals are equal")]
    return [*lines, "", *_result_lines(found)]


def _told(found: Mapping[str, Any]) -> dict[str, list[Any]]:
    forms = dict(COUNTS)
    counts = {
        key: [forms[key](value) if as_number(value) is not None else "-" for value in values]
        for key, values in found["counts"].items()
    }
    status = found["status"]
    return counts if status[0] == status[1] else {"status": status, **counts}


def _table(title: str, differing: Mapping[str, list[Any]], nothing: str) -> list[str]:
    if not differing:
        return [nothing]
    width = max(len(key) for key in differing)
    lines = [title]
    for key, (first, second) in differing.items():
        short = f"  {clean(key):<{width}}  {_value(first)} -> {_value(second)}"
        if len(short) <= WIDTH:
            lines.append(short)
        else:
            lines += [f"  {clean(key)}", f"    {_value(first)}", f"    -> {_value(second)}"]
    return lines


def _value(value: Any) -> str:
    return "-" if value is None else clean(value)


def _result_lines(found: Mapping[str, Any]) -> list[str]:
    lines = [f"results   {'':<23}{'first':>18}{'second':>18}"]
    for row, label in ROWS:
        for key, name, form, _ in METRICS:
            one = found["results"][row].get(key)
            if one is None or one["values"] == [None, None]:
                continue
            shown = ["-" if value is None else form(value) for value in one["values"]]
            lines.append(f"  {label:<15}{name:<11}{shown[0]:>18}{shown[1]:>18}  {_verdict(one)}".rstrip())
            if any(one["intervals"]):
                spans = ["" if span is None else f"{form(span[0])}-{form(span[1])}" for span in one["intervals"]]
                lines.append(f"  {'':<26}{spans[0]:>18}{spans[1]:>18}")
    if len(lines) == 1:
        return ["results   neither run has one"]
    if found["held_out_alike"] is False:
        lines.append("the runs were scored on different held-out text: their results cannot be compared")
    return [*lines, "below a value: its 95 % interval over documents"]


def _verdict(one: Mapping[str, Any]) -> str:
    return {"intervals overlap": "overlap", "no interval": "", "unknown": ""}.get(one["verdict"], str(one["verdict"]))
