"""What a student retains of its teacher's figures, and what it costs beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stillroom.telemetry.record import section
from stillroom.telemetry.wording import as_number, format_percent, format_result

# Quality: the share that is retained, 1 for a student as good as its teacher.
_LOWER_IS_BETTER = ("perplexity", "bits_per_byte", "answer_perplexity")
_HIGHER_IS_BETTER = ("choice_accuracy", "choice_accuracy_by_byte", "exact_match")
QUALITY = (*_LOWER_IS_BETTER, *_HIGHER_IS_BETTER)
# Cost: how many times the teacher's.
_COSTS = (
    "parameters", "weight_megabytes", "disk_megabytes", "load_seconds", "tokens_per_second",
    "prefill_tokens_per_second", "decode_tokens_per_second", "peak_memory_gb",
)  # fmt: skip


def retained(student: Mapping[str, Any], teacher: Mapping[str, Any]) -> dict[str, float]:
    """For quality the share of the teacher's that is retained, for cost how many times the teacher's it is.

    Figures that one of both lacks are left out.
    """
    ours, theirs = ({**row, **(row.get("questions") or {})} for row in (student, teacher))
    shares = {}
    for name in (*QUALITY, *_COSTS):
        top, bottom = as_number(ours.get(name)), as_number(theirs.get(name))
        if name in _LOWER_IS_BETTER:
            top, bottom = bottom, top
        if top is not None and bottom:
            shares[name] = top / bottom
    return shares | _of_tasks(section(student, "tasks"), section(teacher, "tasks"))


def _of_tasks(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """Of each benchmark's figures of which it is known whether higher is better, as `task/figure`."""
    shares = {}
    for task in ours:
        mine, other = section(ours, task), section(theirs, task)
        for name, is_higher in section(mine, "higher_is_better").items():
            top, bottom = as_number(mine.get(name)), as_number(other.get(name))
            if is_higher is False:
                top, bottom = bottom, top
            if is_higher is not None and top is not None and bottom:
                shares[task_key(task, name)] = top / bottom
    return shares


def task_key(task: str, figure: str) -> str:
    return f"{task}/{figure}"


def show_retained(shares: Mapping[str, Any], name: str) -> str:
    """`98.5%` of a quality, `0.24x` of a cost; empty if there is none."""
    value = as_number(shares.get(name))
    if value is None:
        return ""
    return format_percent(value) if name in QUALITY or name not in _COSTS else f"{format_result(value)}x"
