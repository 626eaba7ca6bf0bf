"""Record what a run does, and show it.

Everything a run does becomes an event in one JSONL file. Console, report and diagnosis read events and nothing else,
so a program can later read whatever a person saw.
"""

from stillroom.telemetry.events import EVAL_KEYS, STEP_KEYS, EventLog, SilentLog
from stillroom.telemetry.record import read_events

__all__ = ["EVAL_KEYS", "STEP_KEYS", "EventLog", "SilentLog", "read_events"]
