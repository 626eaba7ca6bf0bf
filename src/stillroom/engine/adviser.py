"""Say what a diagnosis finds while the run continues: each cause once, as an `advice` event."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from stillroom.doctor.diagnose import diagnose
from stillroom.doctor.log_rules import Case
from stillroom.doctor.rules import Finding, roots
from stillroom.telemetry import EventLog
from stillroom.telemetry.events import Event, scan_events
from stillroom.telemetry.run_record import LoggedRun, mapping

_NUM_STEPS = 1000  # the latest step records that are kept: advice about a run is about its present
_ASKED_AT = frozenset({"eval", "run_end"})
_LONGER = "train for longer, or at another learning rate"
_SAID_BY_THE_END = frozenset({"stopped_early", "stalled_run"})  # the record of the end has the reason


class Adviser:
    """A listener of the log that asks for a diagnosis after each evaluation and at the end.

    It keeps what a diagnosis reads in memory, so no evaluation reads the log again. A resumed run has what its log
    holds, and what was said before is not said again.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._steps: deque[tuple[int, Event]] = deque(maxlen=_NUM_STEPS)  # with their place in the log
        self._others: list[tuple[int, Event]] = []
        self._position = 0
        self.said: set[str] = set()
        if log.position:
            for event in scan_events(log.path).records:
                self._keep(event)
        log.listen(self.handle)

    def handle(self, event: Event) -> None:
        self._keep(event)
        if event["event"] in _ASKED_AT and self._steps:
            for finding in self.findings(is_live=event["event"] != "run_end"):
                if finding.is_alarming and finding.cause not in self.said | _SAID_BY_THE_END:
                    self.said.add(finding.cause)
                    self._log.write("advice", step=self._steps[-1][1]["step"], **finding.to_dict())

    def _keep(self, event: Event) -> None:
        self._position += 1
        if event["event"] == "step":
            self._steps.append((self._position, event))
        elif event["event"] == "advice":
            self.said.add(str(event.get("cause")))
        elif event["event"] not in ("checkpoint", "sample", "note") or str(event.get("text")).startswith("injected "):
            self._others.append((self._position, event))

    def findings(self, *, is_live: bool) -> list[Finding]:
        """What is worth saying now: roots, and not what follows from them."""
        in_order = sorted([*self._others, *self._steps], key=lambda one: one[0])
        return roots(diagnose(Case(_record(tuple(event for _, event in in_order), {}), is_live=is_live)))


def _record(events: tuple[Event, ...], summary: dict[str, Any]) -> LoggedRun:
    starts = [event for event in events if event["event"] == "run_start"]
    return LoggedRun("run", mapping(starts[-1], "config") if starts else {}, events, summary)


def advice_of(events: tuple[Event, ...], summary: dict[str, Any], texts: Iterable[str]) -> list[dict[str, Any]]:
    """What the summary of a finished run says: the findings of the whole run.

    `texts` is what its end already says of how much was gained; it stands alone where nothing graver is found.
    """
    findings = diagnose(Case(_record(events, summary)))
    if not any(finding.is_alarming for finding in findings):
        findings = [*(Finding("hint", text, _LONGER, cause="little_gained") for text in texts), *findings]
    return [finding.to_dict() for finding in findings]
