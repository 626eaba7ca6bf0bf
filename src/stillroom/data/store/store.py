"""The token store: an entry for each data file, found by content, tokenizer and settings.

An entry is a folder of parts and a manifest, which is written last. Each part is written whole or not at all, and the
borders between parts depend on the file alone, so a build that was killed goes on with the parts that are there. When
an entry is opened all its bytes are compared with their sums; a part that differs is named and made again.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from stillroom.config.data import DataConfig
from stillroom.data.encode import Tokenizer
from stillroom.data.records import Tally
from stillroom.data.sources import Item
from stillroom.data.sources.compressed import is_compressed
from stillroom.data.store.keys import entry_key, file_digest
from stillroom.data.store.making import Here, Job, Made, Maker, Workers
from stillroom.data.store.part import Damaged, Part, check_part, open_part
from stillroom.data.store.progress import Progress
from stillroom.errors import DataError
from stillroom.files import TEMPORARY, is_disk_full, reason_of, write_atomically

try:
    import fcntl
except ImportError:  # not a Unix: two runs may tokenize the same file at once, and both write the same parts
    fcntl = None  # type: ignore[assignment]

PART_CHARACTERS = 8 << 20
PART_RECORDS = 50_000
WORTH_PROCESSES = 32 << 20  # bytes of a file: below, starting processes takes longer than tokenizing
_MANIFEST = "manifest.json"

Tell = Callable[[str], object]


@dataclass(frozen=True)
class Source:
    """A data file: `items` reads its objects, and counts in the tally what cannot be read."""

    path: Path
    name: str
    items: Callable[[Tally], Iterator[Item]]
    variant: str = ""

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def num_text_bytes(self) -> int | None:
        """About the size of the text in it; None where the file is compressed."""
        return None if is_compressed(self.path) else self.num_bytes


def default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stillroom" / "tokens"


@dataclass(frozen=True)
class TokenStore:
    """Entries for one tokenizer, or for two, and a configuration of one source."""

    folder: Path
    config: DataConfig
    tokenizer: Tokenizer
    tokenizer_digest: str
    tell: Tell
    num_processes: int
    teacher: Tokenizer | None = None  # where it has a tokenizer of its own

    def parts(self, source: Source) -> list[Part]:
        """The tokens of a file, from its entry or made now."""
        key = entry_key(
            file_digest(source.path),
            name=source.name,
            variant=source.variant,
            tokenizer=self.tokenizer_digest,
            config=self.config,
        )
        entry = self.folder / key[:2] / key
        try:
            entry.mkdir(parents=True, exist_ok=True)
            with _locked(entry):
                paths = self._found(entry, source.name) or self._build(entry, source)
                return [open_part(path) for path in paths]
        except OSError as error:
            why = "the disk is full" if is_disk_full(error) else reason_of(error)
            raise DataError(
                f"the token store in {self.folder} cannot be used: {why}",
                where="data.cache",
                advice=["--set data.cache=FOLDER names another place", "--set data.cache=off tokenizes in memory"],
            ) from error

    def _found(self, entry: Path, name: str) -> list[Path]:
        """The parts of a finished entry, checked. Empty if it is not finished or damaged; damaged ones are removed."""
        try:
            num_parts = _read_manifest(entry)
        except Damaged as error:
            self.tell(
                f"token store: the manifest of {name} is damaged ({entry / _MANIFEST}): {error}; it is made again"
            )
            return []
        paths = [entry / _part_name(number) for number in range(num_parts)]
        with ThreadPoolExecutor(self.num_processes) as pool:
            damage = list(pool.map(_damage_of, paths))
        if not any(damage):
            return paths
        for path, reason in zip(paths, damage, strict=True):
            if reason:
                self.tell(f"token store: a part of {name} is damaged ({path}): {reason}; it is tokenized again")
                path.unlink(missing_ok=True)
        (entry / _MANIFEST).unlink()
        return []

    def _build(self, entry: Path, source: Source) -> list[Path]:
        """Make the parts that are missing, then the manifest."""
        for leftover in entry.glob(f"{TEMPORARY}*"):
            leftover.unlink(missing_ok=True)
        progress = Progress(source.name, source.num_text_bytes, self.tell)
        paths: list[Path] = []
        running: set[Future[Made]] = set()
        maker: Maker | None = None
        with contextlib.ExitStack() as stack:
            for items, num_characters, tally in batches(source):
                path = entry / _part_name(len(paths))
                paths.append(path)
                progress.read(num_characters)
                if path.exists() and _damage_of(path) is None:
                    progress.kept()
                    continue
                if maker is None:
                    maker = self._maker(source)
                    stack.callback(maker.close)
                    pool = stack.enter_context(ThreadPoolExecutor(maker.num_at_once))
                while len(running) > maker.num_at_once:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    progress.made([future.result() for future in done], maker.num_at_once)
                running.add(pool.submit(maker.make, Job(path, items, tally)))
            if maker is not None:
                progress.made([future.result() for future in running], maker.num_at_once)
        write_atomically(entry / _MANIFEST, _manifest(len(paths), source.name))
        progress.end()
        return paths

    def _maker(self, source: Source) -> Maker:
        here = Here(self.config, self.tokenizer, self.teacher)
        if self.num_processes < 2 or source.num_bytes < WORTH_PROCESSES:
            return here
        try:
            return Workers(here, self.tokenizer_digest, self.num_processes)
        except DataError as error:
            self.tell(f"token store: {error.what}: one process tokenizes")
            return here


def batches(source: Source) -> Iterator[tuple[list[Item], int, Tally]]:
    """The objects of a file in batches of bounded text, with what was counted while each was read.

    A function of the file alone. There is at least one, so that what was counted in a file without records is kept.
    """
    tally = Tally()
    items: list[Item] = []
    num_characters = 0
    is_first = True
    for item in source.items(tally):
        items.append(item)
        num_characters += _num_characters(item[1])
        if num_characters >= PART_CHARACTERS or len(items) >= PART_RECORDS:
            yield items, num_characters, _drained(tally)
            items, num_characters, is_first = [], 0, False
    if items or is_first or tally.counters or tally.notes:
        yield items, num_characters, _drained(tally)


def _drained(tally: Tally) -> Tally:
    """What the tally holds; it is empty then."""
    full = Tally(tally.counters.copy(), [*tally.notes], [*tally.bad], tally.shapes.copy())
    tally.counters.clear()
    tally.shapes.clear()
    tally.notes.clear()
    tally.bad.clear()
    return full


def _num_characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_num_characters(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return sum(_num_characters(inner) for inner in value)
    return 1


# -- the files of an entry -------------------------------------------------------------------------------


def _part_name(number: int) -> str:
    return f"part-{number:06d}.tok"


def _manifest(num_parts: int, name: str) -> bytes:
    text = json.dumps({"num_parts": num_parts, "of": name})
    return f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode()


def _read_manifest(entry: Path) -> int:
    """The number of parts; 0 if there is no manifest. Raise `Damaged` if it is not what was written."""
    try:
        text, _, checksum = (entry / _MANIFEST).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return 0
    if checksum != f"{zlib.crc32(text):08x}\n".encode():
        raise Damaged("its checksum does not hold")
    return int(json.loads(text)["num_parts"])


def _damage_of(path: Path) -> str | None:
    try:
        check_part(path)
    except FileNotFoundError:
        return "it is missing"
    except Damaged as error:
        return str(error)
    return None


@contextlib.contextmanager
def _locked(entry: Path) -> Iterator[None]:
    """One process at a time builds an entry; the others of a run wait for it."""
    with (entry / "lock").open("a") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
