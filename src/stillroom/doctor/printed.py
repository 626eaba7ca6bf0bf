"""The results of checks as lines of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
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
    lines.append(f"compared  {proof['tensors']:,} tensors, {proof['bytes'] / 1e6:,.1f} MB, and the record of each step")
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


# -- show ------------------------------------------------------------------------------------------
# A plan as lines of at most 80 columns.


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """Bytes by part, every precision, whether it fits, what would make it fit, and the cost."""
    layout = plan["plan"]
    lines = wrapped("precision  ", f"{plan['precision']}: {plan['reason']}")
    lines += ["", f"on {plan['device']}, at the peak ({layout['largest_at']})"]
    lines += _table(layout["device"])
    lines += ["main memory", *_table(layout["main_memory"]), "disk", *_table(layout["disk"])]
    if plan["disk_short_by"]:
        free, short = amount(plan["disk_free"]), amount(plan["disk_short_by"])
        text = f"{free} are free on the disk of this folder, {short} too few: --set checkpoint.keep=1, or another --out"
        lines += wrapped("  ", text)
    lines += ["kept for the backward pass", *_table({**plan["activations"], **_prefixed(plan["attention"])})]
    lines += ["total in each precision"]
    bound = plan["bound"]
    for mode, total in plan["totals"].items():
        lines.append(f"  {mode:<34}{amount(total):>10}  {'fits' if total <= bound else 'does not fit'}")
    lines += ["", *_verdict(plan)]
    if layout.get("process"):
        lines.append(f"with its libraries the process takes about {amount(layout['process'])}")
    lines += ["", *_cost(plan["cost"])]
    for note in plan["notes"]:
        lines += wrapped("note  ", note)
    return lines


def _prefixed(attention: Mapping[str, int]) -> dict[str, int]:
    return {f"attention: {name}": held for name, held in attention.items()}


def _table(parts: Mapping[str, int]) -> list[str]:
    return [f"  {name:<40}{amount(held):>10}" for name, held in parts.items()]


def _verdict(plan: Mapping[str, Any]) -> list[str]:
    total, bound = plan["plan"]["total"], plan["bound"]
    whole = f"{amount(total)} of {amount(bound)}"
    if plan["fits"]:
        return [f"fits: {whole}"]
    lines = [f"does not fit: {whole}"]
    for change in plan["changes"]:
        said = " ".join(f"--set {key}={_word(value)}" for key, value in _single(change["settings"]))
        lines += wrapped("  ", f"{change['what']}: saves {amount(change['saves'])}, leaves "
                               f"{amount(change['total_after'])}; costs: {change['costs']}")  # fmt: skip
        lines += wrapped("    ", said)
    after = plan["fitted"]["total"]
    if plan["is_possible"]:
        return [*lines, f"with these it fits: {amount(after)} of {amount(bound)}"]
    return [*lines, f"nothing makes it fit: {amount(plan['short_by'])} too much with all of these"]


def _cost(cost: Mapping[str, Any]) -> list[str]:
    lines = [f"tokens     {cost['tokens_per_step']:,} a step, padding included"]
    if cost["steps"]:
        count = f"{cost['passes'] or 0:.2g}"
        passes = f", {count} {'pass' if count == '1' else 'passes'} over the data" if cost["passes"] else ""
        lines[0] += f"; {cost['steps']:,} steps, {cost['tokens']:,} in all{passes}"
        lines = wrapped(lines[0][:11], lines[0][11:])
    lines += wrapped(
        "compute    ",
        f"{cost['teacher_flops_per_token']:.3g} operations a token by the teacher, "
        f"{cost['student_flops_per_token']:.3g} by the student, ratio {cost['ratio']:.2f}",
    )
    if cost["cached_over_live"] is not None:
        lines += wrapped(
            "cache      ",
            f"pays from the second pass over the same data on; here {cost['cached_over_live']:.2f} of the live "
            f"arithmetic, about {cost['cache_bytes_per_token']:.0f} bytes a token on disk (an estimate)",
        )
    if cost["answers_per_step"]:
        writing = cost["writing_seconds_per_step"]
        spent = f", {writing:.3g} s of a step" if writing is not None else ""
        lines += wrapped("rollouts   ", f"the student writes {cost['answers_per_step']:.3g} answers a step{spent}")
    if cost["seconds_per_step"] is None:
        return [*lines, "time       not known: --probe measures a step here, --gpu T4 models one"]
    whole = f", {_duration(cost['seconds'])} in all" if cost["seconds"] is not None else ""
    lines += wrapped("time       ", f"{cost['seconds_per_step']:.3g} s a step{whole} ({cost['seconds_from']})")
    if cost["seconds_per_step_compiled"] is not None:
        compiled, peak = cost["seconds_per_step_compiled"], cost["seconds_per_step_at_peak"]
        text = f"{compiled:.3g} s a step with train.compile = 'both'; {peak:.3g} s without it at the data sheet's peaks"
        lines += wrapped("           ", text)
    return lines


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _single(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys of single values: a section is no value that a shell passes on unquoted."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _single({f"{key}.{name}": one for name, one in value.items()})
        else:
            yield key, value


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def amount(num_bytes: float) -> str:
    """Three digits and a unit of a power of ten."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= size:
            value = num_bytes / size
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{num_bytes:.0f} B"
