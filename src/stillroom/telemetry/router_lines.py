"""Format events about a teacher's gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stillroom.telemetry.record import items, show
from stillroom.telemetry.wording import as_number, clean, format_count, format_loss


def largest_drift(event: Mapping[str, Any]) -> float:
    layers = [layer for layer in items(event, "layers") if isinstance(layer, Mapping)]
    return max((as_number(layer.get("drift")) or 0.0 for layer in layers), default=0.0)


def router_line(event: Mapping[str, Any]) -> str:
    """The teacher's held-out loss against the start, and the drift of its gates."""
    parts = [f"router at step {event.get('step')}  {clean(event.get('mode'))}"]
    parts.append(f"teacher loss {show(event, 'teacher_nll', format_loss)}")
    parts.append(f"start {show(event, 'teacher_nll_start', format_loss)}")
    parts.append(f"kl to original {show(event, 'kl_to_original', format_loss)}")
    parts.append(f"drift {largest_drift(event):.3g}")
    parts.append(f"updates {show(event, 'updates', format_count)}")
    parts.append(f"skipped {show(event, 'skipped', format_count)}")
    if event.get("alarm"):
        parts.append("alarm: restored and frozen")
    elif event.get("is_frozen"):
        parts.append("frozen")
    return "  ".join(parts)
