"""What happened, written down once and shown from there.

Everything a run does becomes an event in one JSONL file. Console, report and diagnosis are drawn from
events and from nothing else, so what a person saw is what a program can read later.
"""

from stillroom.telemetry.events import (
    EVAL_KEYS,
    STEP_KEYS,
    EventLog,
    SilentLog,
    read_events,
)

__all__ = ["EVAL_KEYS", "STEP_KEYS", "EventLog", "SilentLog", "read_events"]
