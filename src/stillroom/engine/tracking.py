"""Hand a run's figures to a tracker: TensorBoard, trackio or Weights & Biases, through Accelerate's classes.

A tracker is a listener of the event log. It may be missing, lose its network or fill a disk: that is counted, said
once, and the run goes on. After a few failures in a row it is left alone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stillroom.config import Config

_FOLDER = "tracker"  # in the run's folder, for trackers that write files
_PROJECT = "stillroom"  # of trackers that gather runs
_WITH_FOLDER = ("wandb",)  # by default in the directory that the command was started in
_MOST_FAILURES = 3
_PREFIX = {"step": "train", "eval": "eval"}
_LAST = "run_end"


class Tracking:
    """A listener that hands on the numbers of step and eval records."""

    def __init__(self, name: str, make: Callable[[], Any], settings: Mapping[str, Any], note: Callable[[str], object]):
        self.name, self._note = name, note
        self.num_failed = 0  # records that the tracker did not take
        self._failures = 0  # in a row
        self._tracker: Any = None
        self._try(lambda: self._start(make, settings))

    def __call__(self, record: Mapping[str, Any]) -> None:
        event = str(record.get("event"))
        if self._tracker is None:
            return
        if event in _PREFIX:
            values = dict(numbers(record, _PREFIX[event]))
            self._try(lambda: self._tracker.log(values, step=record.get("step")))
        elif event == _LAST:
            self._end()

    def _start(self, make: Callable[[], Any], settings: Mapping[str, Any]) -> None:
        tracker = make()
        # We call it in the first process only; Accelerate would ask for a process group of its own.
        tracker.main_process_only = False
        tracker.start()
        tracker.store_init_configuration(dict(numbers(settings, "", keeps_text=True)))
        self._tracker = tracker

    def _end(self) -> None:
        tracker, self._tracker = self._tracker, None
        self._try(tracker.finish)
        if self.num_failed:
            self._note(f"{self.name} did not take {self.num_failed:,} records of this run; events.jsonl has them")

    def _try(self, work: Callable[[], Any]) -> None:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # some print where they write: our output may be JSON
                work()
            self._failures = 0
        except Exception as error:  # noqa: BLE001 - libraries of others, and a run is worth more than its picture
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            if self.num_failed == 0:
                self._note(f"the tracker {self.name} failed and the run goes on: {reason}")
            self.num_failed += 1
            self._failures += 1
            if self._failures >= _MOST_FAILURES and self._tracker is not None:
                self._tracker = None
                self._note(f"the tracker {self.name} failed {_MOST_FAILURES} times in a row and is left alone")


def open_tracking(config: Config, folder: Path, note: Callable[[str], object]) -> Tracking | None:
    """The tracker that the configuration asks for; None if it asks for none."""
    name = config.telemetry.tracker
    if name == "none":
        return None

    def make() -> Any:
        from accelerate import tracking

        # Its own logger refuses to work without Accelerate's process state, which would choose a device.
        tracking.logger = logging.getLogger(tracking.__name__)
        kind, run = tracking.LOGGER_TYPE_TO_CLASS[name], folder.resolve().name
        if kind.requires_logging_directory:
            return kind(run, logging_dir=str(folder / _FOLDER))
        more = {"dir": _made(folder / _FOLDER)} if name in _WITH_FOLDER else {}
        tracker = kind(_PROJECT, name=run, **more)
        if name == "trackio":
            tracker.finish = _finish_trackio
        return tracker

    return Tracking(name, make, config.model_dump(mode="json"), note)


def _finish_trackio() -> None:
    """Accelerate ends the run and leaves it the current one: trackio would end it again at exit, into our output."""
    importlib.import_module("trackio").finish()


def _made(folder: Path) -> str:
    """A folder that is there: where it is missing, W&B writes elsewhere."""
    folder.mkdir(exist_ok=True)
    return str(folder)


def numbers(record: Mapping[str, Any], prefix: str, *, keeps_text: bool = False) -> Iterator[tuple[str, Any]]:
    """The numbers of a record by their path, `train/terms/kd/raw`. What is not finite is null there and left out."""
    for key, value in record.items():
        path = f"{prefix}/{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from numbers(value, path, keeps_text=keeps_text)
        elif (isinstance(value, int | float) and (keeps_text or not isinstance(value, bool))) or (
            keeps_text and isinstance(value, str)
        ):
            yield path, value
