"""What a report keeps of a run: its log in a bounded form, and the other files of its folder.

A run of 200,000 steps takes tens of megabytes, not a gigabyte: steps become columns of numbers, guard events are
counted and the first and last of them kept, and of the router's long records only the last is kept whole.

Legend: a row is a kept step in the order of the log. A series holds (row, value) pairs, so a value that some steps
lack takes no memory.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stillroom.telemetry.record import (
    CONFIG,
    LOG,
    SUMMARY,
    Evaluated,
    Event,
    RunReading,
    has_step,
    log_events,
    read_evaluation,
    read_object,
    run_name,
    run_settings,
)
from stillroom.telemetry.wording import as_number, largest_drift, section

Floats = npt.NDArray[np.float64]
Curve = tuple[Floats, Floats]
Key = tuple[str, ...]

PLAIN = ("train_loss", "lr", "grad_norm", "loss_scale", "tokens_per_second", "gpu_memory_gb", "memory_gb")
OF_A_TERM = ("raw", "scaled", "share")
MAX_SERIES = 400  # names come from the log: a damaged one may have any number
MAX_PHASES = 1000
MAX_STEP = 2**62  # a larger number counts no steps, and no column holds it
MAX_GUARD_ROWS = 60
MAX_NOTES = 400
MAX_SAMPLES = 12  # the last are kept
MAX_OTHERS = 5000  # records of each of OTHER_KINDS; the first are kept
OTHER_KINDS = frozenset({"run_start", "gradients", "router_probe", "teacher_quantised", "changed_inputs"})
_KEPT = "keep"
TOKENS = "tokens.json"


class Steps:
    """Kept steps, added one by one. After a rollback the steps that were undone do not count."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._phases = array("H")
        self._phase_codes: dict[str, int] = {}
        self._series: dict[Key, tuple[array[int], array[float]]] = {}
        self.num_left_out = 0  # values of names beyond MAX_SERIES, and records of steps beyond MAX_STEP

    def __len__(self) -> int:
        return int(self._kept().sum()) if self._numbers else 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Add a kept step: a record with a whole `step`."""
        row = len(self._numbers)
        self._numbers.append(event["step"])
        self._phases.append(self._phase_code(event.get("phase")))
        get = event.get
        for name in PLAIN:
            self._put((name,), row, get(name))
        terms = get("terms")
        if isinstance(terms, dict):
            for term, parts in terms.items():
                if isinstance(parts, dict):
                    for part in OF_A_TERM:
                        self._put((part, term), row, parts.get(part))
        sources = get("sources")
        if isinstance(sources, dict):
            for source, parts in sources.items():
                if isinstance(parts, dict):
                    for term, value in parts.items():
                        self._put(("source", source, term), row, value)

    def _put(self, key: Key, row: int, value: Any) -> None:
        if type(value) is not float and type(value) is not int:
            return
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= MAX_SERIES:
                self.num_left_out += 1
                return
            series = self._series[key] = (array("L"), array("d"))
        try:
            series[1].append(value)
        except OverflowError:  # a whole number that no float holds
            return
        series[0].append(row)

    def _phase_code(self, phase: Any) -> int:
        name = phase if isinstance(phase, str) else ""
        code = self._phase_codes.get(name)
        if code is None:
            code = self._phase_codes[name] = min(len(self._phase_codes), MAX_PHASES)
        return code

    # -- reading -----------------------------------------------------------------------------------------

    def _kept(self) -> npt.NDArray[np.bool_]:
        """Whether each row stands: no later row has the same number or a smaller one."""
        numbers = np.array(self._numbers, dtype=np.int64)
        kept = np.ones(len(numbers), np.bool_)
        if len(numbers) > 1:
            smallest_later = np.minimum.accumulate(numbers[::-1])[::-1][1:]
            kept[:-1] = numbers[:-1] < smallest_later
        return kept

    @property
    def last(self) -> int:
        """The number of the last step; 0: there is none."""
        return int(self._numbers[-1]) if self._numbers else 0

    def curve(self, *key: str, above: float | None = None) -> Curve:
        """The finite values of a series over the steps, in order."""
        if key not in self._series:
            return np.empty(0), np.empty(0)
        rows, values = (np.array(part) for part in self._series[key])
        chosen = np.isfinite(values) & self._kept()[rows]
        if above is not None:
            chosen &= values > above
        steps = np.array(self._numbers, dtype=np.float64)[rows[chosen]]
        return steps, values[chosen]

    def terms(self) -> list[str]:
        """The names of terms, in the order in which the log names them."""
        return list(dict.fromkeys(key[1] for key in self._series if key[0] in OF_A_TERM))

    def source_terms(self, source: str) -> list[str]:
        return [key[2] for key in self._series if key[0] == "source" and key[1] == source]

    def first_of_last(self, parts: int) -> float:
        """The number of the step at which the last of so many parts of the steps begins."""
        numbers = np.array(self._numbers, dtype=np.int64)[self._kept()]
        return float(numbers[-max(1, len(numbers) // parts)]) if len(numbers) else 0.0

    def phases(self) -> list[tuple[str, float, float]]:
        """(name, first step, last step) of each stretch of steps in one phase."""
        kept = self._kept()
        numbers, codes = np.array(self._numbers, dtype=np.float64)[kept], np.array(self._phases)[kept]
        if not len(codes):
            return []
        names = {code: name for name, code in reversed(self._phase_codes.items())}
        begins = [0, *(np.flatnonzero(np.diff(codes.astype(np.int64))) + 1).tolist()]
        ends = [*begins[1:], len(codes)]
        return [
            (names[int(codes[begin])], float(numbers[begin]), float(numbers[end - 1]))
            for begin, end in zip(begins, ends, strict=True)
        ]


class Marks:
    """Refused attempts and what the guard did, all of them: (step, gradient norm, loss scale) and a word."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._norms = array("d")
        self._scales = array("d")
        self._words = array("H")
        self._codes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, word: object, norm: Any, scale: Any) -> None:
        self._steps.append(step)
        self._norms.append(_finite(norm))
        self._scales.append(_finite(scale))
        name = word if isinstance(word, str) else ""
        self._words.append(self._codes.setdefault(name, min(len(self._codes), MAX_PHASES)))

    @property
    def steps(self) -> Floats:
        return np.array(self._steps, dtype=np.float64)

    @property
    def norms(self) -> Floats:
        """NaN where the norm was not finite or not recorded."""
        return np.array(self._norms)

    @property
    def scales(self) -> Floats:
        return np.array(self._scales)

    def words(self) -> list[str]:
        names = {code: name for name, code in reversed(self._codes.items())}
        return [names[code] for code in self._words]

    def by_word(self) -> dict[str, Floats]:
        """The steps of each word, the most frequent first."""
        codes, steps = np.array(self._words), self.steps
        found = {name: steps[codes == code] for name, code in self._codes.items()}
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _finite(value: Any) -> float:
    number = as_number(value)
    return float("nan") if number is None else number


def joined(parts: Iterable[Floats]) -> Floats:
    found = list(parts)
    return np.concatenate(found) if found else np.empty(0)


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
        self.num_others_left_out = 0
        self.num_samples_left_out = 0
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
        kind, step = event.get("event"), event.get("step")
        if type(step) is int and abs(step) > MAX_STEP:
            self.steps.num_left_out += 1
            return
        if kind == "step":
            self._add_step(event)
        elif kind == "guard":
            self._add_guard(event)
        elif kind == "eval" and has_step(event):
            self._evals[event["step"]] = {key: value for key, value in event.items() if key != "terms"}
        elif kind == "router" and has_step(event):
            self._add_router(event)
        elif kind == "note":
            self._add_note(event)
        elif kind == "sample":
            self._samples.pop(str(event.get("prompt")), None)  # a resumed run writes its samples again
            self._samples[str(event.get("prompt"))] = event
            if len(self._samples) > MAX_SAMPLES:
                del self._samples[next(iter(self._samples))]
                self.num_samples_left_out += 1
        elif kind == "run_end":
            self.end = event
        elif kind == "resume":
            self.end = {}
        elif kind in OTHER_KINDS:
            others = self._others.setdefault(str(kind), [])
            if len(others) < MAX_OTHERS:
                others.append(event)
            else:
                self.num_others_left_out += 1

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
        if has_step(event):
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


@dataclass(frozen=True)
class RunRecord(RunReading):
    """One run for a page, its steps as columns. `missing` are sentences about what its folder lacks."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=History)
    summary: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    tokens: Mapping[str, Any] = field(default_factory=dict)  # both models on held-out text, token by token
    is_running: bool = False  # the page is written by the run itself, which is still running
    evaluated: Evaluated = field(default_factory=Evaluated)  # what `stillroom eval` measured of the student
    folder: str = ""  # as the user named it

    @staticmethod
    def load(run_dir: Path) -> RunRecord:
        missing: list[str] = []
        return RunRecord.of_folder(run_dir, read_log(run_dir / LOG, missing), missing)

    @staticmethod
    def of_folder(run_dir: Path, history: History, notes: list[str], *, is_running: bool = False) -> RunRecord:
        """A run whose log is read already. A running one has no summary: one from before a resume does not count."""
        summary = {} if is_running else read_object(run_dir / SUMMARY, notes)
        config = read_object(run_dir / CONFIG, notes)
        tokens = {} if is_running else read_object(run_dir / TOKENS, [])
        evaluated = Evaluated() if is_running else read_evaluation(run_dir, notes)
        name, settings = run_name(run_dir, history.start), run_settings(config, history.start)
        return RunRecord(name, settings, history, summary, tuple(notes), tokens, is_running, evaluated, str(run_dir))

    @property
    def start(self) -> Mapping[str, Any]:
        return self.history.start

    @property
    def end(self) -> Mapping[str, Any]:
        """How the run ended, unless it was resumed after that."""
        return self.history.end

    @property
    def steps(self) -> Steps:
        """The applied steps."""
        return self.history.steps

    @cached_property
    def refused(self) -> list[tuple[float, float, str]]:
        """(step, gradient norm, verdict) of refused attempts: step records, and guard events of steps without one."""
        marks, guards = self.history.refused, self.history.guarded
        refused = list(zip(marks.steps.tolist(), marks.norms.tolist(), marks.words(), strict=True))
        recorded = {step for step, _, _ in refused}
        guarded = zip(guards.steps.tolist(), guards.norms.tolist(), guards.words(), strict=True)
        return sorted(refused + [mark for mark in guarded if mark[0] not in recorded], key=lambda mark: mark[0])

    @cached_property
    def evals(self) -> list[Event]:
        return self.history.evals


def read_log(path: Path, missing: list[str]) -> History:
    """What a report keeps of a log. Sentences about what is lacking are added to `missing`."""
    history = History.of(log_events(path, missing))
    if history.steps.num_left_out:
        missing.append(f"{history.steps.num_left_out:,} values of {path.name} are left out: too many names, too large.")
    if history.num_others_left_out:
        missing.append(f"{history.num_others_left_out:,} records of {path.name} are left out: too many of one kind.")
    return history
