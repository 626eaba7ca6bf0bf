"""The results of checks as lines of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import Any

from stillroom.telemetry.wording import clean

_WIDTH = 80


def selftest_lines(report: Mapping[str, Any]) -> list[str]:
    """A row for each group of trials, then each that failed or could not be run, then the sum."""
    groups = dict.fromkeys(trial["group"] for trial in report["trials"])
    lines = [f"{'group':<14}{'trials':>8}{'failed':>8}{'not run':>9}{'nearest its bound':>20}{'seconds':>9}"]
    for group in groups:
        own = [trial for trial in report["trials"] if trial["group"] == group]
        counts = [sum(trial["status"] == status for trial in own) for status in ("failed", "not run")]
        seconds = sum(trial["seconds"] for trial in own)
        lines.append(f"{group:<14}{len(own):>8}{counts[0]:>8}{counts[1]:>9}{_nearest(own):>20}{seconds:>9.1f}")
    for trial in report["trials"]:
        if trial["status"] == "failed":
            lines += wrapped("failed  ", f"{trial['group']}: {trial['name']}: {trial['why']}")
    left_out = Counter((one["group"], one["why"]) for one in report["trials"] if one["status"] == "not run")
    for (group, why), count in left_out.items():
        lines += wrapped("not run  ", f"{count} of {group}: {why}")
    passed = sum(trial["status"] == "passed" for trial in report["trials"])
    lines.append(f"{passed} of {len(report['trials'])} trials passed in {report['seconds']:.0f} s")
    return lines


def _nearest(trials: list[Mapping[str, Any]]) -> str:
    """The largest error as a share of its bound."""
    shares = [
        trial["error"] / trial["bound"]
        for trial in trials
        if trial["error"] is not None and trial["bound"] and trial["error"] == trial["error"]
    ]
    return f"{max(shares):.0%}" if shares else "exact"


def resume_lines(proof: Mapping[str, Any]) -> list[str]:
    """What was compared, and each difference, with the number of those left out."""
    most = 5
    lines = wrapped(
        "runs    ",
        f"{proof['steps']} steps without a break; the same killed before step {proof['killed_at']} and resumed from "
        f"step {proof['resumed_from']}; {proof['precision']}, {proof['seconds']:.0f} s",
    )
    lines.append(f"beside  {proof['tensors']:,} tensors, {proof['bytes'] / 1e6:,.1f} MB, and the record of each step")
    if proof.get("refused"):
        lines.append(f"refused a run with other {', other '.join(proof['refused'])}")
    if proof["same"]:
        return [*lines, "same    every bit"]
    for found in proof["differences"][:most]:
        lines += wrapped("differs ", f"{found['name']}: {found['what']}")
    if len(proof["differences"]) > most:
        lines.append(f"differs {len(proof['differences']) - most:,} others")
    return lines


def doctor_lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(level, line): the findings by subject, each with what to try, and how many there are of each level."""
    lines: list[tuple[str, str]] = []
    last = ""
    for found in report["findings"]:
        if found["subject"] != last:
            last = found["subject"]
            lines.append(("", last))
        level = found["level"]
        lines += [(level, line) for line in wrapped(f"  {level:<6}", found["what"])]
        if found["try"]:
            lines += [("", line) for line in wrapped("        try: ", found["try"])]
    counts = ", ".join(f"{report[level]} {level}" for level in ("red", "amber", "green"))
    return [*lines, ("", counts)]


def wrapped(label: str, text: str, width: int = _WIDTH) -> list[str]:
    """A label and a text, continued below the text's first word."""
    indent = " " * len(label)
    return textwrap.wrap(
        clean(text), width, initial_indent=label, subsequent_indent=indent, break_on_hyphens=False
    ) or [label.rstrip()]
