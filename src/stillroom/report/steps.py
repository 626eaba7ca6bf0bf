"""The steps of a run as columns of numbers: a run of 200,000 steps takes tens of megabytes, not a gigabyte.

Legend: a row is a kept step in the order of the log. A series holds (row, value) pairs, so a value that some steps
lack takes no room.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from stillroom.telemetry.wording import as_number

Floats = npt.NDArray[np.float64]
Curve = tuple[Floats, Floats]
Key = tuple[str, ...]

PLAIN = ("train_loss", "lr", "grad_norm", "loss_scale", "tokens_per_second", "gpu_memory_gb", "memory_gb")
OF_A_TERM = ("raw", "scaled", "share")
MAX_SERIES = 400  # names come from the log: more of them are no objective of ours
MAX_PHASES = 1000


class Steps:
    """Kept steps, added one by one. After a rollback the steps that were undone do not count."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._phases = array("H")
        self._phase_codes: dict[str, int] = {}
        self._series: dict[Key, tuple[array[int], array[float]]] = {}
        self.num_left_out = 0  # values of names beyond MAX_SERIES

    def __len__(self) -> int:
        return int(self._kept().sum()) if self._numbers else 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Add a kept step: a record with a whole `step`."""
        row = len(self._numbers)
        try:
            self._numbers.append(event["step"])
        except OverflowError:
            self.num_left_out += 1
            return
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
        try:
            self._steps.append(step)
        except OverflowError:
            return
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
