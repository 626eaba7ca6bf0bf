"""What a student retains of its teacher's figures, and what it costs beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    return shares


def show_retained(shares: Mapping[str, Any], name: str) -> str:
    """`98.5%` of a quality, `0.24x` of a cost; empty if there is none."""
    value = as_number(shares.get(name))
    if value is None:
        return ""
    return format_percent(value) if name in QUALITY else f"{format_result(value)}x"
