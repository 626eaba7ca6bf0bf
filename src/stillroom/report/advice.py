"""The page's part about what could be better: causes with the steps and the evidence, as the summary lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stillroom.report.markup import Html, element
from stillroom.report.record import RunRecord
from stillroom.telemetry.reading import items
from stillroom.telemetry.wording import clean, clip, format_count

MAX_ITEMS = 20
MAX_STEPS = 8


def advice_part(run: RunRecord) -> Html | None:
    """None where the summary has no advice. An entry is a sentence, or {cause, steps, evidence, advice}."""
    entries = [_entry(value) for value in items(run.summary, "advice")[:MAX_ITEMS]]
    present = [entry for entry in entries if entry is not None]
    return element("ul", *present, class_="advice") if present else None


def _entry(value: Any) -> Html | None:
    if isinstance(value, str) and value.strip():
        return element("li", element("p", value))
    if not isinstance(value, Mapping):
        return None
    cause, advice = (clean(value.get(key) or "") for key in ("cause", "advice"))
    steps = [format_count(step) for step in items(value, "steps")[:MAX_STEPS] if type(step) is int]
    more = ", ..." if len(items(value, "steps")) > MAX_STEPS else ""
    evidence = clip(value.get("evidence") or "", 400)
    lines = [
        element("p", cause, class_="cause") if cause else None,
        element("p", advice) if advice else None,
        element("p", f"Steps {', '.join(steps)}{more}.", class_="note") if steps else None,
        element("p", evidence, class_="note") if evidence else None,
    ]
    return element("li", *lines) if any(lines) else None
