"""Write a cache: the missing shards, one at a time, whole or not at all, by one process or by several.

A writer locks the shard that it writes; in a store it also claims it (`in_store.py`). Shards of other writers are
skipped and looked for again at the end. Locks and claims only share the work: a shard that two processes wrote has the
same rows and is replaced as a whole. So if nothing is written for `PATIENCE_SECONDS`, shards that another machine
locked or claimed are written here: that machine may be gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stillroom.core.errors import CannotSave, ConfigError
from stillroom.core.files import TEMPORARY, reason_of, write_atomically
from stillroom.core.locks import LockHeld, has_ended, hold
from stillroom.core.types import IGNORED, Batch
from stillroom.data import Rows
from stillroom.teachers.cache.format import SUFFIX, Block, pack, shard_bytes
from stillroom.teachers.cache.in_store import OURS, Origin
from stillroom.teachers.cache.manifest import NAME, SHARDS, Manifest, check_same, is_there, read_manifest
from stillroom.teachers.cache.reader import Cache, shard_paths
from stillroom.teachers.signals import NOTHING, RowAnswer, SignalSpec

# -- the plan --------------------------------------------------------------------------------------------
# Which rows a cache needs, and which of them share a shard.
#
# The plan follows from the rows that are missing and from nothing else: neither from who asks, nor from what was
# tried before. Rows are ordered by length, then by key, and cut where a shard is full; a shard that is already there
# takes whole stretches out of that order, and the others stay as they were. So a writer that was killed continues with
# the same shards, several writers plan the same ones, and rows that were added later make new shards.


_KEYED = 64  # rows that are looked at together


@dataclass(frozen=True)
class NeededRow:
    """A row of some data, by the key under which its answer is kept."""

    key: str
    num_tokens: int
    rows: Rows
    index: int
    name: str


@dataclass(frozen=True)
class ShardPlan:
    """Rows that are written together."""

    rows: tuple[NeededRow, ...]

    @property
    def name(self) -> str:
        """Name the shard by its keys, so that every process that plans the same rows uses the same name."""
        keys = "".join(sorted(row.key for row in self.rows))
        return hashlib.blake2b(keys.encode("ascii"), digest_size=12).hexdigest()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def batches(self, max_tokens: int) -> Iterator[Batch]:
        """The rows as batches of at most so many tokens, padding included; one row at least."""
        start = 0
        for end in range(1, len(self.rows) + 1):
            following = self.rows[end] if end < len(self.rows) else None
            # Ascending lengths: the last row of a batch is its longest. A batch is made from one source of rows.
            if (
                following is None
                or following.num_tokens * (end + 1 - start) > max_tokens
                or following.rows is not self.rows[end - 1].rows
            ):
                yield self.rows[start].rows.batch([row.index for row in self.rows[start:end]])
                start = end


def needed_rows(sides: Iterable[tuple[Rows, Sequence[int]]]) -> list[NeededRow]:
    """The rows that are named, each content once. A row without targets asks for nothing."""
    found: dict[str, NeededRow] = {}
    for rows, indices in sides:
        for start in range(0, len(indices), _KEYED):
            chosen = [int(index) for index in indices[start : start + _KEYED]]
            batch = rows.batch(chosen)
            sizes, is_asked = batch.attention_mask.sum(1).tolist(), (batch.targets != IGNORED).any(1).tolist()
            for number, (index, key) in enumerate(zip(chosen, batch.keys, strict=True)):
                if is_asked[number]:
                    found.setdefault(key, NeededRow(key, sizes[number], rows, index, batch.sample_ids[number]))
    return list(found.values())


def plan_shards(missing: Sequence[NeededRow], shard_tokens: int) -> list[ShardPlan]:
    """The missing rows in shards, the shortest rows first."""
    plans: list[ShardPlan] = []
    chosen: list[NeededRow] = []
    size = 0
    for row in sorted(missing, key=lambda row: (row.num_tokens, row.key)):
        chosen.append(row)
        size += row.num_tokens
        if size >= shard_tokens:
            plans.append(ShardPlan(tuple(chosen)))
            chosen, size = [], 0
    return [*plans, ShardPlan(tuple(chosen))] if chosen else plans


# -- writing ---------------------------------------------------------------------------------------------

LOCK = "writers.lock"
PATIENCE_SECONDS = 180.0  # network file systems show another machine's changes after up to 60
_PAUSE_SECONDS, _STORE_PAUSE_SECONDS = 0.5, 5.0  # between checks for shards of other writers


class AnswersRows(Protocol):
    """Who is asked."""

    @property
    def batch_tokens(self) -> int:
        """How many tokens it is asked at once."""

    def answer_rows(self, batch: Batch, specs: Sequence[SignalSpec]) -> list[list[RowAnswer]]:
        """For each signal the answer to each row."""


@dataclass(frozen=True)
class Progress:
    """How far a writer is, over all shards of the cache that were missing when it began."""

    done_tokens: int
    all_tokens: int
    num_bytes: int  # written by this process
    written_tokens: int  # by this process
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.written_tokens / max(self.seconds, 1e-9)

    @property
    def eta_seconds(self) -> float:
        return (self.all_tokens - self.done_tokens) / max(self.tokens_per_second, 1e-9)


class _Meter:
    """Counts what is asked and written, and tells."""

    def __init__(self, tell: Callable[[Progress], None], whole: int) -> None:
        self._tell, self._whole, self._begun = tell, whole, time.monotonic()
        self._done = self._asked = self._in_shard = self._num_bytes = 0

    def asked(self, num_tokens: int) -> None:
        """So many tokens of the present shard were answered."""
        self._asked += num_tokens
        self._in_shard += num_tokens
        self._report(min(self._done + self._in_shard, self._whole))

    def shard(self, left: int, num_bytes: int) -> None:
        """A shard is written; `left` tokens are in none yet, by whomever they will be written."""
        self._done, self._in_shard = self._whole - left, 0
        self._num_bytes += num_bytes
        self._report(self._done)

    def _report(self, done: int) -> None:
        self._tell(Progress(done, self._whole, self._num_bytes, self._asked, time.monotonic() - self._begun))


def open_store(folder: Path, manifest: Manifest) -> Manifest:
    """Begin a cache in a folder, or find that it is the one that was begun. Answers with the manifest that is there."""
    try:
        others = sorted(path.name for path in folder.iterdir() if not _is_ours(path)) if folder.exists() else []
        if others and not is_there(folder):
            raise ConfigError(
                f"{folder} is not empty and holds no teacher cache: {', '.join(others[:4])}",
                where="--out",
                advice=["choose another folder with --out", "nothing in it was touched"],
            )
        (folder / SHARDS).mkdir(parents=True, exist_ok=True)
        with hold(folder / LOCK, waits=True):
            if not is_there(folder):
                for leftover in folder.glob(f"{TEMPORARY}{NAME}-*"):  # left by a killed writer: the lock is ours
                    leftover.unlink(missing_ok=True)
                _commit(folder / NAME, manifest.to_bytes())
            elif (origin := Origin.of(folder)) is not None:
                origin.send(folder / NAME)
                origin.send_rest()
    except OSError as error:
        raise _unwritable(folder, error) from error
    there = read_manifest(folder)
    check_same(there, manifest, folder)
    return there


def _is_ours(path: Path) -> bool:
    return path.name in (SHARDS, NAME, *OURS) or path.name.startswith((LOCK, f"{TEMPORARY}{NAME}"))


def write_missing(
    folder: Path,
    needed: Sequence[NeededRow],
    teacher: AnswersRows,
    *,
    beside: Sequence[Path] = (),
    tell: Callable[[Progress], None] = lambda _progress: None,
    is_stopped: Callable[[], bool] = lambda: False,
    patience_seconds: float = PATIENCE_SECONDS,
) -> bool:
    """Write every needed row that is not there. Answers False where it was stopped before all of them were.

    `beside` are caches of other signals for the same rows: one pass of the teacher serves all of them.
    """
    folders = (folder, *beside)
    missing = {row.key: row for place in folders for row in missing_rows(Cache(place), needed)}
    plans = plan_shards(list(missing.values()), read_manifest(folder).shard_tokens)
    meter = _Meter(tell, sum(plan.num_tokens for plan in plans))
    left, last_written = plans, time.monotonic()
    while left:
        is_patient = time.monotonic() - last_written < patience_seconds
        for plan in left:
            if is_stopped():
                return False
            with _claimed(folders, plan, is_patient=is_patient) as is_mine:
                if not is_mine or not _unwritten(folders, [plan]):
                    continue
                contents = _contents(plan, folders, teacher, is_stopped, meter)
                if contents is None:
                    return False
                for place, held in contents.items():
                    _commit(_path(place, plan), held)
            meter.shard(sum(one.num_tokens for one in _unwritten(folders, plans)), sum(map(len, contents.values())))
        num_left, left = len(left), _unwritten(folders, left)
        if len(left) < num_left:
            last_written = time.monotonic()
        elif left:
            time.sleep(_PAUSE_SECONDS if Origin.of(folder) is None else _STORE_PAUSE_SECONDS)
    _sweep(folders)
    return True


@contextlib.contextmanager
def _claimed(folders: Sequence[Path], plan: ShardPlan, *, is_patient: bool) -> Iterator[bool]:
    """Lock and claim a shard. Yield whether this process may write it; it may exist already."""
    origins = [origin for origin in map(Origin.of, folders) if origin is not None]
    with contextlib.ExitStack() as ending:
        try:
            ending.enter_context(hold(folders[0] / SHARDS / f"{TEMPORARY}{plan.name}.lock"))
        except LockHeld as error:
            if is_patient or has_ended(error.owner) is not None:  # on this machine: its lock ends with its process
                yield False
                return
        except OSError:  # not writable: writing the shard raises, with advice
            pass
        is_there = [origin.learn(plan.name) for origin in origins]  # not lazily: every header is needed
        if not all(is_there):
            if not origins[0].claim(plan.name, secrets.token_hex(8)) and is_patient:
                yield False
                return
            ending.callback(origins[0].give_back, plan.name)
        yield True


def _sweep(folders: Sequence[Path]) -> None:
    """Remove temporary files, locks and claims that killed writers left, of shards that are written.

    Not of others: several impatient writers may be writing one of those.
    """
    for folder in folders:
        written = {path.stem for path in shard_paths(folder)}
        for path in (folder / SHARDS).glob(f"{TEMPORARY}*"):
            if path.name.removeprefix(TEMPORARY).partition(".")[0] in written:
                path.unlink(missing_ok=True)
        if (origin := Origin.of(folder)) is not None:
            origin.give_back(*(origin.claimed() & written))


def _path(folder: Path, plan: ShardPlan) -> Path:
    return folder / SHARDS / f"{plan.name}{SUFFIX}"


def _unwritten(folders: Sequence[Path], plans: Sequence[ShardPlan]) -> list[ShardPlan]:
    """Of some plans, those whose shard is not in every folder."""
    there = set.intersection(*({entry.name for entry in os.scandir(folder / SHARDS)} for folder in folders))
    return [plan for plan in plans if f"{plan.name}{SUFFIX}" not in there]


def missing_rows(cache: Cache, needed: Sequence[NeededRow]) -> list[NeededRow]:
    """The needed rows that a cache does not answer."""
    known = cache.has([row.key for row in needed])
    return [row for row, is_known in zip(needed, known, strict=True) if not is_known]


def _contents(
    plan: ShardPlan, folders: Sequence[Path], teacher: AnswersRows, is_stopped: Callable[[], bool], meter: _Meter
) -> dict[Path, bytes] | None:
    """The shard's bytes for each folder, or None where the writer was asked to stop in the middle of it."""
    manifests = [read_manifest(folder) for folder in folders]
    answers: list[dict[str, RowAnswer]] = [{} for _ in folders]
    for batch in plan.batches(teacher.batch_tokens):
        if is_stopped():
            return None
        given = teacher.answer_rows(batch, [manifest.signal for manifest in manifests])
        for kept, rows in zip(answers, given, strict=True):
            kept |= dict(zip(batch.keys, rows, strict=True))
        meter.asked(int(batch.attention_mask.sum()))
    packed = [pack_shard(kept, manifest) for kept, manifest in zip(answers, manifests, strict=True)]
    return dict(zip(folders, packed, strict=True))


def pack_shard(answers: dict[str, RowAnswer], manifest: Manifest) -> bytes:
    """Answers by key as the bytes of a shard."""
    blocks = [
        Block(bytes.fromhex(key), answer.num_positions, pack(answer, manifest.id_bytes))
        for key, answer in answers.items()
    ]
    counters = {"mass": 0.0, "unusable": 0, "floored": 0}
    for _key, answer in sorted(answers.items()):
        counters["mass"] += float(answer.mass.sum())
        counters["unusable"] += int((answer.entropy == NOTHING).sum())
        counters["floored"] += int((answer.log_probs == NOTHING - 1).sum())
    return shard_bytes(manifest.store, blocks, counters)


def commit_shard(folder: Path, plan: ShardPlan, contents: bytes) -> None:
    """Put a shard that was made elsewhere into its place."""
    _commit(_path(folder, plan), contents)
    _sweep([folder])


def _commit(path: Path, contents: bytes) -> None:
    """Write a file and upload it. A writer that finds the shard written may remove our temporary file."""
    folder = path.parent.parent if path.name.endswith(SUFFIX) else path.parent
    try:
        try:
            write_atomically(path, contents, mark=secrets.token_hex(6))
        except FileNotFoundError:
            if not path.exists():
                raise
        if (origin := Origin.of(folder)) is not None:
            origin.send(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> CannotSave:
    return CannotSave(
        f"cannot write the cache: {reason_of(error)}",
        where=str(path),
        advice=[
            "free some space on that disk, or see to its permissions",
            "then give the same command again: finished shards are kept, and none is half written",
        ],
    )
