"""A teacher on a server: its top tokens and what they leave over, for a run or for a cache."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from stillroom.config import Config
from stillroom.config.schema import TeacherConfig
from stillroom.data import Rows, fixed_batches
from stillroom.errors import ConfigError
from stillroom.models.load.files import read_json
from stillroom.models.load.source import fetch
from stillroom.teachers.base import SignalKind, Teacher
from stillroom.teachers.entries import Given, position_answer
from stillroom.teachers.served.server import Server, check_steady, check_temperature, open_server
from stillroom.teachers.signals import RowAnswer, SignalSpec, label_yardsticks, signal_of
from stillroom.teachers.sparse import describe, to_device
from stillroom.teachers.spec import check_use, served_spec
from stillroom.types import IGNORED, Batch, Needs, Signal

Window = Callable[[int], Sequence[Batch]]

_LEAST_TAIL = 1e-6  # what is left of 1 after some dozens of FP32 log-probabilities is rounding below this
_COMPARED = (
    "held-out KL and agreement are taken from these tokens and what they leave over, not from the whole vocabulary: "
    "KL is a lower bound"
)
_LEAST_ROW = 8  # tokens that data.max_length has at least
_TRIAL_ROWS = 64  # spread over the data; they are asked until there are enough positions
_TRIAL_POSITIONS = 512  # of the data, by which the temperature is told


class ServedTeacher(Teacher):
    """Asks each row as a prompt of ids, several at once, and the rows of the next window ahead.

    Each piece of a packed row is a prompt by itself: a server cannot be told that attention stops there. After the rows
    of a window, or of a batch of a cache, the probe is asked again, so that no answer of another model is kept unseen.
    """

    def __init__(
        self,
        server: Server,
        spec: SignalSpec,
        *,
        vocab_size: int,
        device: torch.device,
        concurrency: int,
        window: Window | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.server, self.spec = server, spec.within(vocab_size)
        self.kind: SignalKind = "top-k"
        self.num_exact = self.spec.exact
        self.batch_tokens = server.shape.batch_tokens
        facts = server.facts
        told = f"the teacher is not loaded: {facts.model} on {facts.url} answers with {describe(self.spec)}"
        at_once = min(concurrency, server.shape.most_at_once or concurrency)
        self.notes = (f"{told}, {at_once} requests at once, by {server.shape.name}", _COMPARED)
        self.notes += (*server.notes, *notes)
        self._device, self._window = device, window
        self._least_tail = 0.0 if self.spec.exact >= vocab_size else _LEAST_TAIL
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="stillroom-server")
        self._ahead: dict[str, Future[RowAnswer]] = {}
        self._probing: Future[None] | None = None
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._mass = 0.0

    def close(self) -> None:
        """Give up what is under way."""
        self.server.client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- answering ---------------------------------------------------------------------------------------

    def observe(self, batch: Batch, needs: Needs) -> Signal:
        answers = self._rows(batch)
        self._mass += sum(float(answer.mass.sum()) for answer in answers)
        with self._lock:
            self._counters["observed"] += batch.num_scored
        return to_device(signal_of(RowAnswer.join(answers), self.spec), self._device)

    def answer_rows(self, batch: Batch, specs: Sequence[SignalSpec]) -> list[list[RowAnswer]]:
        """For a cache. Its signals are those of the server: `served_spec` refused all others."""
        answers = self._rows(batch)
        self.server.check_again()
        for spec in specs:
            if (spec.exact, spec.temperature, spec.draws) != (self.spec.exact, 1.0, 0):
                raise ConfigError(f"a server gives {describe(self.spec)}, and the cache holds {describe(spec)}")
        return [answers for _ in specs]

    def _rows(self, batch: Batch) -> list[RowAnswer]:
        asked = {
            key: self._ahead.get(key) or self._pool.submit(self._answer, *row)
            for key, row in zip(batch.keys, _rows_of(batch), strict=True)
        }
        try:
            found = {key: future.result() for key, future in asked.items()}
        except BaseException:
            self.close()
            raise
        return [found[key] for key in batch.keys]

    def _answer(self, ids: list[int], targets: list[int], pieces: list[int]) -> RowAnswer:
        """The answer to a row without padding. Tokens after the last scored one are not sent."""
        parts, counters = [RowAnswer.unusable(0, self.spec)], Counter[str]()
        for begin, end in _stretches(pieces):
            scored = [place for place in range(begin, end) if targets[place] != IGNORED]
            if not scored:
                continue
            places = [place - begin + 1 for place in scored]
            given = self.server.score([*ids[begin : scored[-1] + 1], targets[scored[-1]]], places)
            parts += [
                position_answer(
                    given.entries[place - begin + 1],
                    targets[place],
                    self.spec,
                    counters,
                    least_tail=self._least_tail,
                )
                for place in scored
            ]
        with self._lock:
            self._counters.update(counters)
        return RowAnswer.join(parts)

    # -- asking ahead ------------------------------------------------------------------------------------

    def begin_window(self, window: Sequence[Batch], cursor: int) -> None:
        """Send for the rows of this window and the next, and then the probe, whose answer is looked at next time."""
        self._end_probing()
        upcoming = self._window(cursor + 1) if self._window is not None else ()
        batches = (*window, *upcoming)
        wanted = {key for batch in batches for key in batch.keys}
        for key in [known for known in self._ahead if known not in wanted]:
            self._ahead.pop(key).cancel()
        for batch in batches:
            for key, row in zip(batch.keys, _rows_of(batch), strict=True):
                if key not in self._ahead:
                    self._ahead[key] = self._pool.submit(self._answer, *row)
        self._probing = self._pool.submit(self.server.check_again)

    def verify(self) -> None:
        """Raise if the server had another model after a window, so that nothing of it is saved."""
        self._end_probing()

    def _end_probing(self) -> None:
        if self._probing is not None:
            self._probing.result()
            self._probing = None

    # -- what is known of it -----------------------------------------------------------------------------

    def own_yardsticks(self, batches: Sequence[Batch]) -> dict[str, Any] | None:
        answers = [answer for batch in batches for answer in self._rows(batch)]
        return label_yardsticks(answers, batches, parameters=None, source=f"answers of {self.server.facts.url}")

    def check_stored(self, probed: Sequence[float]) -> None:
        """Raise where the probe was answered otherwise when a cache was begun."""
        check_steady(probed, self.server.probed, since="when the cache was begun")

    def try_rows(self, batches: Sequence[Batch]) -> str:
        """Ask rows of the data, raise where their answers are of another temperature, and say what was found."""
        given: list[Given] = []
        for batch in batches:
            for ids, targets, pieces in _rows_of(batch):
                begin, end = next(iter(_stretches(pieces)))
                if end - begin > 1 and targets[end - 1] != IGNORED:
                    given.append(self.server.score([*ids[begin:end], targets[end - 1]]))
            if sum(len(one.entries) for one in given) >= _TRIAL_POSITIONS:
                break
        return check_temperature(given, self.spec.exact, is_raw=self.server.is_raw)

    def summary(self) -> dict[str, Any]:
        observed = self._counters["observed"]
        mass = self._mass / observed if observed else None
        return {
            "teacher_signal": {**self.spec.to_dict(), "mean_mass": mass},
            "teacher_server": {**self.server.facts.to_dict(), **self.facts()},
        }

    def facts(self) -> dict[str, int]:
        """What was counted: requests and their repetitions, tails that are too small to be told."""
        return {**self.server.client.counters, "unresolved_tails": self._counters["unresolved_tails"]}


def _rows_of(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """(ids, targets, which piece each position is in) of each row, without padding."""
    pieces = torch.zeros_like(batch.input_ids) if batch.segments is None else batch.segments
    found = []
    for number in range(batch.input_ids.shape[0]):
        length = max(1, int(batch.attention_mask[number].sum()))
        found.append(tuple(one[number, :length].tolist() for one in (batch.input_ids, batch.targets, pieces)))
    return found  # type: ignore[return-value]


def _stretches(pieces: Sequence[int]) -> list[tuple[int, int]]:
    """Where each piece of a row begins and ends."""
    begins = [0, *(place for place in range(1, len(pieces)) if pieces[place] != pieces[place - 1])]
    return list(zip(begins, [*begins[1:], len(pieces)], strict=True))


# -- for a run or a cache --------------------------------------------------------------------------------


def served_rows(section: TeacherConfig, student_rows: int) -> int:
    """Rows of the served model's head, where its configuration lies next to its tokenizer; else the student's."""
    source = fetch(section, section.model, weights=False)
    if source.is_gguf or not (source.folder / "config.json").is_file():
        return student_rows
    told = read_json(source, "config.json")
    found = told.get("vocab_size", told.get("text_config", {}).get("vocab_size"))
    return found if isinstance(found, int) else student_rows


def served_teacher(
    config: Config,
    tokenizer: Any,
    vocab_size: int,
    rows: Rows,
    device: torch.device,
    *,
    window: Window | None = None,
) -> ServedTeacher:
    """The server as a teacher, after its probe and a trial on rows of the data."""
    spec, section = served_spec(config), config.teacher
    server = open_server(section, tokenizer, num_wanted=spec.exact, vocab_size=vocab_size)
    _check_length(server, rows)
    teacher = ServedTeacher(
        server,
        spec,
        vocab_size=vocab_size,
        device=device,
        concurrency=section.requests.concurrency,
        window=window,
        notes=check_use(config, spec),
    )
    if section.requests.check_temperature:
        teacher.notes += (teacher.try_rows(list(fixed_batches(rows, 1, _TRIAL_ROWS))),)
    return teacher


def _check_length(server: Server, rows: Rows) -> None:
    """A row is sent with its last target, and the server generates one token, which nobody reads."""
    limit = server.facts.max_tokens
    longest = int(rows.longest.max()) + 2 if len(rows) else 0
    if limit is not None and longest > limit:
        raise ConfigError(
            f"a row and the tokens after it are {longest:,} tokens, and the server takes {limit:,}",
            where="data.max_length",
            advice=[
                *([f"--set data.max_length={limit - 2}"] if limit >= _LEAST_ROW + 2 else []),
                "start the server with a longer context",
            ],
        )
