"""Hand a run's numbers to a tracker: TensorBoard, trackio or Weights & Biases.

A tracker is a listener of the event log. It may be missing, lose its network or fill a disk: that is counted, logged
once, and the run continues. After a few failures in a row it is left alone.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from stillroom.config import Config

_FOLDER = "tracker"  # in the run's folder, for trackers that write files
_PROJECT = "stillroom"  # of trackers that gather runs
_MOST_FAILURES = 3
_PREFIX = {"step": "train", "eval": "eval"}
_LAST = "run_end"


class Tracker(Protocol):
    def log(self, values: dict[str, Any], step: Any) -> None: ...

    def finish(self) -> None: ...


class TensorBoard:
    """Event files in a folder."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        writer: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer = writer.SummaryWriter(str(folder))
        self._writer.add_hparams(settings, metric_dict={})

    def log(self, values: dict[str, Any], step: Any) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class Project:
    """A run in a project of W&B or trackio, whose modules have the same functions."""

    def __init__(self, library: str, name: str, settings: dict[str, Any], **options: Any) -> None:
        self._library: Any = importlib.import_module(library)
        self._run = self._library.init(project=_PROJECT, name=name, config=settings, **options)

    def log(self, values: dict[str, Any], step: Any) -> None:
        self._run.log(values, step=step)

    def finish(self) -> None:
        # By the module: ended by its own method, the run stays trackio's current one and is ended again at exit.
        self._library.finish()


class Tracking:
    """A listener that hands on the numbers of step and eval records."""

    def __init__(self, name: str, start: Callable[[], Tracker], note: Callable[[str], object]) -> None:
        self.name, self._note = name, note
        self.num_failed = 0  # records that the tracker did not take
        self._failures = 0  # in a row
        self._tracker: Tracker | None = None
        self._try(lambda: self._start(start))

    def __call__(self, record: Mapping[str, Any]) -> None:
        event = str(record.get("event"))
        tracker = self._tracker
        if tracker is None:
            return
        if event in _PREFIX:
            values = dict(numbers(record, _PREFIX[event]))
            self._try(lambda: tracker.log(values, step=record.get("step")))
        elif event == _LAST:
            self._end(tracker)

    def _start(self, start: Callable[[], Tracker]) -> None:
        self._tracker = start()

    def _end(self, tracker: Tracker) -> None:
        self._tracker = None
        self._try(tracker.finish)
        if self.num_failed:
            self._note(f"{self.name} did not take {self.num_failed:,} records of this run; events.jsonl has them")

    def _try(self, work: Callable[[], Any]) -> None:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # some print where they write: our output may be JSON
                work()
            self._failures = 0
        except Exception as error:  # noqa: BLE001 - libraries of others, and a run is worth more than its chart
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            if self.num_failed == 0:
                self._note(f"the tracker {self.name} failed and the run continues: {reason}")
            self.num_failed += 1
            self._failures += 1
            if self._failures >= _MOST_FAILURES and self._tracker is not None:
                self._tracker = None
                self._note(f"the tracker {self.name} failed {_MOST_FAILURES} times in a row and is left alone")


def open_tracking(config: Config, folder: Path, note: Callable[[str], object]) -> Tracking | None:
    """Start the tracker that the configuration asks for; None if it asks for none."""
    name = config.telemetry.tracker
    if name == "none":
        return None

    settings = dict(numbers(config.model_dump(mode="json"), "", keeps_text=True))
    run, own = folder.resolve().name, folder / _FOLDER

    def start() -> Tracker:
        if name == "tensorboard":
            return TensorBoard(own / run, settings)
        if name == "trackio":
            return Project(name, run, settings)
        own.mkdir(exist_ok=True)  # where the folder is missing, W&B writes to another one
        return Project(name, run, settings, dir=str(own))

    return Tracking(name, start, note)


def numbers(record: Mapping[str, Any], prefix: str, *, keeps_text: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of a record by path, `train/terms/kd/raw`. What is not finite is null there and left out."""
    for key, value in record.items():
        path = f"{prefix}/{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from numbers(value, path, keeps_text=keeps_text)
        elif (isinstance(value, int | float) and (keeps_text or not isinstance(value, bool))) or (
            keeps_text and isinstance(value, str)
        ):
            yield path, value
