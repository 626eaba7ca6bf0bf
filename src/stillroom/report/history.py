"""What a report keeps of an event log, gathered record by record.

Steps become columns (`steps.py`), guard events are counted and the first and last of them kept, and of the gates' long
records only the last is kept whole. So the memory of a report hardly grows with the length of a run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from stillroom.report.steps import Marks, Steps
from stillroom.telemetry.events import Event
from stillroom.telemetry.reading import section
from stillroom.telemetry.router_lines import largest_drift
from stillroom.telemetry.wording import as_number

MAX_GUARD_ROWS = 60
MAX_NOTES = 400
MAX_SAMPLES = 24
MAX_OTHERS = 5000  # of each kind; the first are kept
_UNUSED = frozenset({"checkpoint", "phase"})
_KEPT = "keep"


class History:
    """The records of a run, in a bounded form."""

    def __init__(self) -> None:
        self.num_events = 0
        self.steps = Steps()
        self.refused = Marks()  # step records that were not kept
        self.guarded = Marks()  # guard events
        self.guard_counts: Counter[str] = Counter()
        self.notes: dict[str, None] = {}
        self.num_notes_left_out = 0
        self.end: Mapping[str, Any] = {}  # how the run ended, unless it went on after that
        self._first_guards: list[Event] = []
        self._last_guards: deque[Event] = deque(maxlen=MAX_GUARD_ROWS // 2)
        self.last_router: Event = {}
        self._evals: dict[int, Event] = {}
        self._routers: dict[int, Event] = {}
        self._samples: dict[str, Event] = {}
        self._others: dict[str, list[Event]] = {}

    @staticmethod
    def of(events: Iterable[Event]) -> History:
        history = History()
        for event in events:
            history.add(event)
        return history

    def add(self, event: Event) -> None:
        self.num_events += 1
        kind = event.get("event")
        if kind == "step":
            self._add_step(event)
        elif kind == "guard":
            self._add_guard(event)
        elif kind == "eval" and _has_step(event):
            self._evals[event["step"]] = {key: value for key, value in event.items() if key != "terms"}
        elif kind == "router" and _has_step(event):
            self._add_router(event)
        elif kind == "note":
            self._add_note(event)
        elif kind == "sample":
            self._samples.pop(str(event.get("prompt")), None)  # a resumed run writes its samples again
            self._samples[str(event.get("prompt"))] = event
            if len(self._samples) > MAX_SAMPLES:
                del self._samples[next(iter(self._samples))]
        elif kind == "run_end":
            self.end = event
        elif kind == "resume":
            self.end = {}
        elif kind not in _UNUSED:
            others = self._others.setdefault(str(kind), [])
            if len(others) < MAX_OTHERS:
                others.append(event)

    def _add_step(self, event: Event) -> None:
        self.end = {}
        if type(event.get("step")) is not int:
            return
        verdict = event.get("verdict", _KEPT)
        if verdict == _KEPT:
            self.steps.add(event)
        else:
            self.refused.add(event["step"], verdict, event.get("grad_norm"), event.get("loss_scale"))

    def _add_guard(self, event: Event) -> None:
        self.guard_counts[str(event.get("action"))] += 1
        if len(self._first_guards) < MAX_GUARD_ROWS // 2:
            self._first_guards.append(event)
        else:
            self._last_guards.append(event)
        if _has_step(event):
            evidence = section(event, "evidence")
            self.guarded.add(event["step"], event.get("action"), evidence.get("grad_norm"), evidence.get("loss_scale"))

    def _add_note(self, event: Event) -> None:
        text = str(event.get("text"))
        if text in self.notes:
            return
        if len(self.notes) < MAX_NOTES:
            self.notes[text] = None
        else:
            self.num_notes_left_out += 1

    def _add_router(self, event: Event) -> None:
        self.last_router = event
        short = {key: value for key, value in event.items() if key != "layers"}
        self._routers[event["step"]] = short | {"largest_drift": largest_drift(event)}

    # -- reading -----------------------------------------------------------------------------------------

    def of_kind(self, kind: str) -> list[Event]:
        """The records of a kind that is not gathered in another way."""
        return self._others.get(kind, [])

    @property
    def start(self) -> Mapping[str, Any]:
        """The last start: a resumed run may be on another machine."""
        return (self.of_kind("run_start") or [{}])[-1]

    @property
    def guards(self) -> list[Event]:
        return [*self._first_guards, *self._last_guards]

    @property
    def num_guards(self) -> int:
        return self.guard_counts.total()

    @property
    def evals(self) -> list[Event]:
        """The last evaluation of each step, in order, without those that gave no number."""
        evals = [self._evals[step] for step in sorted(self._evals)]
        return [event for event in evals if as_number(event.get("perplexity")) is not None]

    @property
    def routers(self) -> list[Event]:
        """The last record of the gates at each step, in order."""
        return [self._routers[step] for step in sorted(self._routers)]

    @property
    def samples(self) -> list[Event]:
        return list(self._samples.values())


def _has_step(event: Event) -> bool:
    return type(event.get("step")) is int
