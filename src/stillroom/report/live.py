"""Write the report while the run is running, at its evaluations.

`handle` is a listener of the run's event log. Writing takes time from the run, so it is counted, and a page is left out
where it would take the writing above MAX_SHARE of the run's time. A page that cannot be written never stops a run: the
first failure is logged, all are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stillroom.core.files import reason_of
from stillroom.report.history import History, RunRecord, read_log
from stillroom.report.page import PAGE, render, save

MAX_SHARE = 0.01  # of the run's time
FIRST_GUESS = 0.25  # seconds that a page takes, before one was written

Clock = Callable[[], float]


class LiveReport:
    """Writes `report.html` of one run. Events of other runs (the demo's baselines) are not its own and are ignored."""

    def __init__(
        self, folder: Path, tell: Callable[[dict[str, Any]], object], *, clock: Clock = time.monotonic
    ) -> None:
        self._folder = folder
        self._tell = tell
        self._clock = clock
        self._began = clock()
        self._history: History | None = None
        self._is_ours = False
        self._last_cost = FIRST_GUESS
        self.num_written = 0
        self.num_left_out = 0
        self.num_failed = 0
        self.seconds = 0.0

    def handle(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        if kind == "run_start":
            self._is_ours = self._history is None and event.get("run") in (
                self._folder.name,
                self._folder.resolve().name,
            )
        if not self._is_ours:
            return
        if self._history is not None:
            self._history.add(dict(event))
        elif kind == "step":  # a page before the first step would be empty; a resumed run has a past in its log
            self._history = read_log(self._folder / "events.jsonl", [])
        if kind == "eval":
            self._write_if_cheap()
        if kind == "run_end":
            self._is_ours = False

    def _write_if_cheap(self) -> None:
        now = self._clock()
        if self._history is None or self.seconds + self._last_cost > MAX_SHARE * (now - self._began):
            self.num_left_out += 1
            return
        try:
            run = RunRecord.of_folder(self._folder, self._history, [], is_running=True)
            save(self._folder / PAGE, render(run, self.foot()))
            self.num_written += 1
        except Exception as error:  # noqa: BLE001 - neither a full disk nor a fault of the page may stop a run
            self._fail(error)
        self._last_cost = self._clock() - now
        self.seconds += self._last_cost

    def _fail(self, error: Exception) -> None:
        """Count a failure and say the first."""
        self.num_failed += 1
        if self.num_failed == 1:
            text = f"the report during the run could not be written, and the run continues: {reason_of(error)}"
            self._tell({"event": "note", "text": text})

    def close(self) -> None:
        """After a run that did not finish: replace a page that says the run is running, and loads itself again."""
        if not self.num_written or self._history is None:
            return
        try:
            run = RunRecord.of_folder(self._folder, self._history, [])
            save(self._folder / PAGE, render(run, self.foot()))
        except Exception as error:  # noqa: BLE001 - the run's own end is what is reported
            self._fail(error)

    def foot(self) -> str:
        """What the writing cost, for the page; empty where nothing was tried."""
        num_tries = self.num_written + self.num_left_out + self.num_failed
        if not num_tries:
            return ""
        failed = f", {self.num_failed} could not be written" if self.num_failed else ""
        return (
            f"Updates of this page during the run: {self.num_written} in {self.seconds:.1f} s; left out to stay below "
            f"{MAX_SHARE:.0%} of the run's time: {self.num_left_out}{failed}."
        )
