"""What differs between two runs: settings, machine and results, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stillroom.telemetry.reading import items, reading, section
from stillroom.telemetry.run_record import LoggedRun, mapping
from stillroom.telemetry.wording import as_number, clean, format_count, format_duration, format_percent, format_result

YARDSTICKS = (
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
WIDTH = 80


def compare(first: LoggedRun, second: LoggedRun) -> dict[str, Any]:
    """The differing settings, surroundings, counts, and each yardstick of each model side by side."""
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
                key: _beside(first.result(row), second.result(row), key, less, is_alike)
                for key, _, _, less in YARDSTICKS
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


def _beside(
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
        for key, name, form, _ in YARDSTICKS:
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
