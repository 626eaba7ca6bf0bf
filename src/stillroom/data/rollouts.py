"""Rounds of text that the student wrote: their files, their rows, and their place in the order of the data.

A round is what the student answered to some prompts at one step. It is sealed in the run's folder and serves the next
`every` windows. So a rollout is a row like any other, and only when rows are made is new: a window stays a function of
the data, the sealed rounds, the seed and its number, and a retried or resumed step sees the same rows.

A round's folder holds pieces, each the answers that were written at once, and `round.json` with the sum of each piece.
While it is written the folder is named for the student's weights too: after a kill, pieces of the same student are
kept and those of another are not.

# R rows, T tokens of all rows end to end, K kept ids
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from stillroom.core.errors import CheckpointUnusable
from stillroom.core.files import Count, FileSum, Stored, inside, mend, reason_of, sum_of_bytes, write_atomically
from stillroom.core.types import ROLLOUTS, Batch
from stillroom.data.loader import Loader
from stillroom.data.packing import Rows, pack
from stillroom.data.records import Tally
from stillroom.data.tokenize import Encoded, Ints

Prompt = tuple[str, list[int]]  # its name and its tokens

_ROUND, _FACTS = "round.json", "facts"
_PROMPTS, _ORDER = 1, 2  # tell the random numbers of two purposes apart
_SEALED = re.compile(r"^round-(\d{6,})$")
_OPEN = re.compile(r"^round-(\d{6,})\.of-[0-9a-f]+$")


# -- what was written ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """A teacher's stored answers at the scored positions of a row: kept tokens and the exact mass of the rest."""

    ids: npt.NDArray[np.int32]  # [N, K]
    log_probs: npt.NDArray[np.float32]  # [N, K]
    tail: npt.NDArray[np.float32]  # [N]


@dataclass(frozen=True)
class Rollout:
    """One answer of the student: the tokens of its prompt and its own, the end token included."""

    name: str
    prompt: list[int]
    ids: list[int]
    log_probs: list[float]
    ended: str
    answers: Answers | None = None


def to_bytes(rollouts: Sequence[Rollout]) -> bytes:
    """A piece of a round as a file."""
    flat = np.concatenate([[*one.prompt, *one.ids] for one in rollouts]).astype(np.int32)
    arrays: dict[str, npt.NDArray[Any]] = {
        "ids": flat,
        "prompt_lengths": np.array([len(one.prompt) for one in rollouts], np.int64),
        "lengths": np.array([len(one.ids) for one in rollouts], np.int64),
        "log_probs": np.concatenate([one.log_probs for one in rollouts]).astype(np.float32),
    }
    kept = [one.answers for one in rollouts if one.answers is not None]
    if kept:
        arrays |= {
            "answer_ids": np.concatenate([one.ids for one in kept]),
            "answer_log_probs": np.concatenate([one.log_probs for one in kept]),
            "answer_tail": np.concatenate([one.tail for one in kept]),
        }
    facts = {"names": [one.name for one in rollouts], "ended": [one.ended for one in rollouts]}
    # One entry: the library writes several in any order, and the same answers are the same bytes.
    return bytes(save(arrays, metadata={_FACTS: json.dumps(facts)}))


def of_bytes(contents: bytes) -> list[Rollout]:
    """The answers of a piece. Raise ValueError where the file is damaged."""
    try:
        arrays, facts = load(contents), json.loads(_metadata(contents)[_FACTS])
        names, ended = facts["names"], facts["ended"]
        before, lengths = arrays["prompt_lengths"].tolist(), arrays["lengths"].tolist()
        ids, log_probs = arrays["ids"].tolist(), arrays["log_probs"].tolist()
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no piece of a round: {reason_of(error)}") from error
    is_whole = len(names) == len(ended) == len(before) == len(lengths) and min([0, *before, *lengths]) >= 0
    if not is_whole or sum(before) + sum(lengths) != len(ids) or sum(lengths) != len(log_probs):
        raise ValueError("its arrays do not belong together")
    found, place, answered = [], 0, 0
    for name, why, num_before, size in zip(names, ended, before, lengths, strict=True):
        middle = place + num_before
        part = slice(answered, answered + size)
        answers = None
        if "answer_ids" in arrays:
            answers = Answers(*(arrays[f"answer_{key}"][part] for key in ("ids", "log_probs", "tail")))
            if not len(answers.ids) == len(answers.log_probs) == len(answers.tail) == size:
                raise ValueError("its stored answers are not those of its tokens")
        row = Rollout(str(name), ids[place:middle], ids[middle : middle + size], log_probs[part], str(why), answers)
        found.append(row)
        place, answered = middle + size, answered + size
    return found


def _metadata(contents: bytes) -> Mapping[str, str]:
    size = int.from_bytes(contents[:8], "little")
    header: Mapping[str, Mapping[str, str]] = json.loads(contents[8 : 8 + size])
    return header.get("__metadata__", {})


class RoundFacts(Stored):
    """`round.json`: what is known of a sealed round."""

    round: Count
    step: Count  # optimizer steps applied before it was written
    weights: str  # fingerprint of the student that wrote it
    settings: str  # hash of what else decides what it wrote
    rows: Count
    tokens: Count
    seconds: float
    ended: dict[str, int]  # answers by why they ended
    drops: list[str]  # answers that ended so are not learned from
    pieces: dict[str, FileSum]

    @property
    def writer(self) -> str:
        return self.weights + self.settings


@dataclass(frozen=True)
class Round:
    """A sealed round and what is learned from."""

    facts: RoundFacts
    rollouts: tuple[Rollout, ...] = field(repr=False)

    @property
    def number(self) -> int:
        return self.facts.round


class RoundStore:
    """The rounds of a run on disk. One process seals and removes; all read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def numbers(self) -> list[int]:
        """The sealed rounds."""
        found = [_SEALED.match(path.name) for path in self.folder.glob("round-*") if path.is_dir()]
        return sorted(int(match[1]) for match in found if match)

    def open_folder(self, number: int, writer: str) -> Path:
        """Where a writer, a student with these weights and settings, puts the pieces of a round."""
        return self.folder / f"round-{number:06d}.of-{writer}"

    def begin(self, number: int, writer: str) -> Path:
        """Make the folder of a new round. Remove an older round of the number, and pieces of other writers."""
        own = self.open_folder(number, writer)
        own.mkdir(parents=True, exist_ok=True)
        mend(own)  # what a kill left of an atomic write
        self.remove(number)
        for path in self.folder.glob("round-*"):
            if _OPEN.match(path.name) and path != own:
                shutil.rmtree(path)
        return own

    def piece(self, number: int, writer: str, place: int) -> list[Rollout] | None:
        """A piece that is written already; None where it is not, or is damaged."""
        path = self.open_folder(number, writer) / _piece(place)
        try:
            return of_bytes(path.read_bytes())
        except (OSError, ValueError):
            return None

    def keep_piece(self, number: int, writer: str, place: int, rollouts: Sequence[Rollout]) -> None:
        write_atomically(self.open_folder(number, writer) / _piece(place), to_bytes(rollouts))

    def seal(self, facts: RoundFacts) -> None:
        """Close a round whose pieces are all there: the facts last, then the name."""
        own = self.open_folder(facts.round, facts.writer)
        write_atomically(own / _ROUND, json.dumps(facts.model_dump(), indent=1).encode())
        own.rename(self._sealed(facts.round))

    def sums(self, number: int, writer: str, num_pieces: int) -> dict[str, FileSum]:
        own = self.open_folder(number, writer)
        return {_piece(place): sum_of_bytes((own / _piece(place)).read_bytes()) for place in range(num_pieces)}

    def facts(self, number: int) -> RoundFacts | None:
        """What is known of a sealed round; None where there is none that can be read."""
        try:
            return RoundFacts.of(json.loads((self._sealed(number) / _ROUND).read_bytes()))
        except (OSError, ValueError):
            return None

    def read(self, number: int) -> Round:
        """Read a sealed round. Raise where its files are gone or changed: the student that wrote it is gone too."""
        try:
            facts = RoundFacts.of(json.loads((self._sealed(number) / _ROUND).read_bytes()))
            rollouts: list[Rollout] = []
            for name, wanted in facts.pieces.items():
                contents = inside(self._sealed(number), name).read_bytes()
                if sum_of_bytes(contents) != wanted:
                    raise ValueError(f"{name} does not have its checksum")
                rollouts += of_bytes(contents)
            if facts.round != number or len(rollouts) != facts.rows:
                raise ValueError(f"{_ROUND} is of another round")
        except (OSError, ValueError) as error:
            raise CheckpointUnusable(
                f"round {number} of the rollouts cannot be read: {reason_of(error)}",
                where=str(self._sealed(number)),
                advice=[
                    "put the file back: the run learns on this round until the next one",
                    "or begin again in another folder with --out",
                ],
            ) from error
        drops = set(facts.drops)
        return Round(facts, tuple(one for one in rollouts if one.ids and one.ended not in drops))

    def remove(self, number: int) -> None:
        if (path := self._sealed(number)).exists():
            shutil.rmtree(path)

    def remove_after(self, number: int, *, but: int = -1) -> list[int]:
        """Remove the sealed rounds after one, and return their numbers."""
        later = [one for one in self.numbers() if one > number and one != but]
        for one in later:
            self.remove(one)
        return later

    def _sealed(self, number: int) -> Path:
        return self.folder / f"round-{number:06d}"


def _piece(place: int) -> str:
    return f"piece-{place:06d}.safetensors"


# -- rows ------------------------------------------------------------------------------------------------


def rows_of(rollouts: Sequence[Rollout], max_length: int, pad_id: int) -> Rows:
    """Answers as rows: each in its own, its prompt not scored, its answer to the last token."""
    tokens = [np.array([*one.prompt, *one.ids], np.int32) for one in rollouts]
    is_scored = [np.arange(len(ids)) >= len(one.prompt) for ids, one in zip(tokens, rollouts, strict=True)]
    bounds = np.cumsum([0, *(len(ids) for ids in tokens)])
    flat = np.concatenate(tokens)
    names = [one.name for one in rollouts]
    # Bytes are not counted: nobody compares the bits per byte of text that the student wrote.
    encoded = Encoded(
        ids=flat,
        num_bytes=np.zeros(len(flat), np.int32),
        is_scored=np.concatenate(is_scored),
        bounds=bounds,
        names=names,
        groups=names,
        has_prompt=np.ones(len(names), np.bool_),
    )
    tally = Tally()
    rows = pack(encoded, "rows", max_length, tally, pad_id=pad_id)
    if len(rows) != len(rollouts) or tally.counters["truncated_records"]:
        raise ValueError(f"{len(rollouts)} answers are not {len(rows)} whole rows of {max_length} tokens")
    return rows


def chosen_prompts(prompts: Sequence[Prompt], num_rows: int, samples: int, seed: int, number: int) -> list[Prompt]:
    """The prompts of a round, each `samples` times: a permutation of all, and another where they do not suffice."""
    num_prompts = -(-num_rows // samples)
    passes = -(-num_prompts // len(prompts))
    orders = [np.random.default_rng([seed, _PROMPTS, number, turn]).permutation(len(prompts)) for turn in range(passes)]
    order = np.concatenate(orders)[:num_prompts]
    return [prompts[place] for place in order.tolist() for _ in range(samples)][:num_rows]


# -- order -----------------------------------------------------------------------------------------------


class RolloutLoader(Loader):
    """Windows of data and rollouts. A window always has all its micro-batches.

    The share of rollouts is apportioned by error diffusion: after i windows there were floor(sum of shares) of them.
    The data is read on where rollouts leave room, so no row of it is passed over.
    """

    def __init__(
        self,
        data: Loader,
        *,
        share: Callable[[float], float],  # at the progress of the run, from 0 to 1
        num_steps: int,
        every: int,
        keep_rounds: int,
        max_length: int,
        pad_id: int,
    ) -> None:
        self.__dict__.update(vars(data))
        self.data = data
        self._num_steps = num_steps
        self._every = every or num_steps
        self._is_once = every == 0
        self._keep_rounds = keep_rounds
        self._max_length, self._pad_id = max_length, pad_id
        shares = [self._accumulation * share(step / num_steps) for step in range(num_steps)]
        self._sums = np.concatenate([[0.0], np.cumsum(shares)])
        self._last = self._accumulation * share(1.0)
        self._served: dict[int, tuple[Rows, Ints]] = {}

    # -- which micro-batches are rollouts ------------------------------------------------------------------

    def num_rollouts(self, index: int) -> int:
        """Micro-batches of rollouts before window `index`."""
        if index <= self._num_steps:
            total = float(self._sums[index])
        else:  # skipped windows are made up for at the end
            total = float(self._sums[-1]) + (index - self._num_steps) * self._last
        return math.floor(total + 1e-6)

    def uses_rollouts(self, index: int) -> bool:
        return self.num_rollouts(index + 1) > self.num_rollouts(index)

    def round_of(self, index: int) -> int:
        return 0 if self._is_once else index // self._every

    def rows_served(self, number: int) -> int:
        """Rows that the windows of a round take."""
        first, last = number * self._every, (number + 1) * self._every
        return (self.num_rollouts(last) - self.num_rollouts(first)) * self._batch_size

    # -- rounds ----------------------------------------------------------------------------------------------

    def older(self, number: int) -> range:
        """The numbers of older rounds that a round is mixed with, were they written."""
        return range(max(0, number - self._keep_rounds), number)

    def rows_wanted(self, number: int, older: Sequence[Round] = ()) -> int:
        """New rows of a round: all that it serves, or an equal part where older rounds are used again."""
        served = self.rows_served(number)
        reused = min(served * len(older) // (len(older) + 1), sum(len(one.rollouts) for one in older))
        return served - reused

    def take(self, rounds: Sequence[Round]) -> None:
        """Serve the last of these rounds, mixed with the others."""
        newest = rounds[-1].number
        rollouts = [one for round_ in rounds for one in round_.rollouts]
        rows = rows_of(rollouts, self._max_length, self._pad_id)
        num_new, wanted = len(rounds[-1].rollouts), self.rows_served(newest)
        rng = np.random.default_rng([self._seed, _ORDER, newest])
        old, new = np.arange(len(rollouts) - num_new), np.arange(len(rollouts) - num_new, len(rollouts))
        chosen = np.concatenate([rng.permutation(new)[:wanted], rng.permutation(old)])[: max(wanted, 1)]
        self._served = {newest: (rows, rng.permutation(chosen))}

    def forget(self) -> None:
        """Serve nothing until rounds are given again: the run returned to an earlier step."""
        self._served = {}

    # -- windows ---------------------------------------------------------------------------------------------

    def known(self, index: int) -> bool:
        return not self.uses_rollouts(index) or self.round_of(index) in self._served

    def whole_window(self, index: int) -> list[Batch]:
        if index < 0:
            raise IndexError(f"window {index}: windows are counted from 0")
        before, after = self.num_rollouts(index), self.num_rollouts(index + 1)
        number, last = index * self._accumulation - before, (index + 1) * self._accumulation - after
        batches = [self._batch(*divmod(place, self.num_batches)) for place in range(number, last)]
        return [*batches, *self._rollouts(index, before, after)]

    def _rollouts(self, index: int, before: int, after: int) -> Iterator[Batch]:
        if before == after:
            return
        number = self.round_of(index)
        if number not in self._served:
            raise LookupError(f"window {index} needs round {number} of the rollouts, which is not written yet")
        rows, order = self._served[number]
        first = before - self.num_rollouts(number * self._every)
        for place in range(first, first + after - before):
            # A round with fewer rows than it serves, because answers were dropped, begins again.
            start = place * self._batch_size
            chosen = np.take(order, np.arange(start, start + self._batch_size), mode="wrap")
            batch = rows.batch(chosen, index=index * self._accumulation + place - first)
            yield replace(batch, sources=(ROLLOUTS,) * len(chosen))

    def first_window(self) -> list[Batch]:
        return self.data.window(0)

    def epochs(self, cursor: int) -> float:
        return (cursor * self._accumulation - self.num_rollouts(cursor)) / self.num_batches
