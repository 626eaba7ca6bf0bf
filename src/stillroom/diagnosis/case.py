"""What a diagnosis looks at: the record of a run, and whether somebody still works on it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from statistics import median
from typing import Any

from stillroom.telemetry.events import Event
from stillroom.telemetry.reading import reading
from stillroom.telemetry.run_record import LoggedRun, mapping
from stillroom.telemetry.wording import as_number

NUM_CITED = 5  # steps named in a finding
_INJECTED = re.compile(r"injected (\w+) at step (\d{1,9})\b")


_UNKNOWN = object()


@dataclass(frozen=True)
class Case:
    """A run to be diagnosed. `now` and `is_owned` (a process holds the folder) are None where nobody looked."""

    record: LoggedRun
    now: datetime | None = None
    is_owned: bool | None = None
    is_live: bool = False  # asked by the run itself, which goes on

    @cached_property
    def steps(self) -> list[Event]:
        """The applied steps, in order."""
        return self.record.kept_steps

    @cached_property
    def attempts(self) -> list[Event]:
        return [event for event in self.record.of("step") if isinstance(event.get("step"), int)]

    @cached_property
    def guards(self) -> list[Event]:
        return self.record.of("guard")

    @cached_property
    def schedule(self) -> Mapping[str, Any]:
        return mapping(self.record.start, "schedule")

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """The counters of the data."""
        return mapping(self.record.start, "data")

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def planned_steps(self) -> int:
        return self.record.num_steps_planned

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches in a step, over all processes."""
        own = int(as_number(self.schedule.get("gradient_accumulation")) or 1)
        return own * int(as_number(self.schedule.get("processes")) or 1)

    @cached_property
    def vocab_size(self) -> int:
        found = [size for event in self.record.of("first_forward") if (size := as_number(event.get("vocabulary")))]
        return int(found[-1]) if found else 0

    @property
    def distils(self) -> bool:
        """Whether a term that needs the teacher's answers had a weight in any step."""
        return any(weight_of(step, "kd") for step in self.steps)

    def setting(self, key: str) -> Any:
        """A setting by its dotted name; None where the record has none."""
        value: Any = self.record.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def number(self, key: str, default: float = 0.0) -> float:
        value = as_number(self.setting(key))
        return default if value is None else value

    # -- what advice must know ---------------------------------------------------------------------------

    @cached_property
    def injected(self) -> list[tuple[str, int]]:
        """The faults of --inject that struck, and the steps at which they did."""
        texts = [str(event.get("text")) for event in self.record.of("note")]
        return [(found[1], int(found[2])) for text in texts if (found := _INJECTED.match(text))]

    def effective(self, key: str) -> Any:
        """What a setting came to be: `auto` is replaced by what the run chose, as far as its record says."""
        if key == "precision.mode":
            return mapping(self.record.start, "precision").get("mode") or self.setting(key)
        if key == "teacher.dtype" and self.setting(key) == "auto" and not any(numbers(self.attempts, "gpu_memory_gb")):
            return "float32"  # on a CPU
        return self.setting(key)

    def has(self, assignment: str) -> bool:
        """Whether the run already had what an assignment for --set asks for."""
        key, _, text = assignment.partition("=")
        value = self.effective(key) if self.record.config else _UNKNOWN
        if value is None or isinstance(value, bool):
            return text.lower() == str(value).lower()
        number = as_number(value)
        try:
            return float(text) == number
        except ValueError:
            return text == str(value)

    # -- losses held out ---------------------------------------------------------------------------------

    def nll(self, row: str) -> float | None:
        """Nats a token of a row of the summary, or of the first or last evaluation where there is no summary."""
        perplexity = self.record.perplexity(row)
        if perplexity is None and row == "teacher":
            for event in self.record.of("teacher_eval"):
                perplexity = reading(event, "perplexity")
        return log_of(perplexity)

    @property
    def nll_before(self) -> float | None:
        first = [event for event in self.record.evals if event["step"] == 0]
        return self.nll("student_before") or (log_of(reading(first[0], "perplexity")) if first else None)

    @property
    def nll_last(self) -> float | None:
        """Of the student after its last step, which need not be the one that was kept."""
        evals = self.record.evals
        return log_of(reading(evals[-1], "perplexity")) if evals else None

    @property
    def nll_best(self) -> float | None:
        found = [value for event in self.record.evals if (value := log_of(reading(event, "perplexity"))) is not None]
        return min(found, default=None)

    @property
    def teacher_nll_on_training(self) -> float | None:
        """The teacher's loss on the first batch of the training data, where it judged the alignment of targets."""
        for event in reversed(self.record.of("first_forward")):
            alignment = mapping(event, "alignment")
            if alignment.get("model") == "teacher":
                return as_number(alignment.get("as_given"))
        return None


# -- small helpers ---------------------------------------------------------------------------------------


def log_of(perplexity: float | None) -> float | None:
    if perplexity is None or not perplexity > 0 or not math.isfinite(perplexity):
        return None
    return math.log(perplexity)


def terms_of(step: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: term for name, term in mapping(step, "terms").items() if isinstance(term, Mapping)}


def weight_of(step: Mapping[str, Any], term: str) -> float:
    return as_number(terms_of(step).get(term, {}).get("weight")) or 0.0


def numbers(events: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """The finite values of a key."""
    return [value for event in events if (value := as_number(event.get(key))) is not None]


def middle(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def cited(events: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    """The first steps of some events, each once, in order."""
    steps = dict.fromkeys(event["step"] for event in events if isinstance(event.get("step"), int))
    return tuple(steps)[:NUM_CITED]


def span(events: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """The first and the last step of some events."""
    steps = [event["step"] for event in events if isinstance(event.get("step"), int)]
    return tuple(dict.fromkeys((steps[0], steps[-1]))) if steps else ()
