"""Laws of caches in a store: many writers leave the cache of one, and readers bring what they read."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cache_cases as cases
import pytest
import tiny
from faulty_store import FaultyStore, faulty_store

from stillroom.core import locks, remote
from stillroom.core.errors import CannotSave, ConfigError, Interrupted
from stillroom.teachers.cache import writer as writing
from stillroom.teachers.cache.in_store import Origin, folder_of
from stillroom.teachers.cache.reader import Cache, damaged_shards, shard_paths
from stillroom.teachers.cache.writer import open_store, write_missing

LENGTHS = [3 + (number * 7) % 17 for number in range(60)]


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PAUSE", 0.0)
    monkeypatch.setattr(writing, "_STORE_PAUSE_SECONDS", 0.05)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))


@pytest.fixture
def faulty() -> Iterator[type[FaultyStore]]:
    with faulty_store() as store:
        yield store


def held(folder: Path) -> dict[str, bytes]:
    """The files of a cache, without locks and what is kept beside it."""
    return {name: data for name, data in cases.contents(folder).items() if "lock" not in name and name[0] != "."}


def write(url: str, rows: Any, teacher: Any = None, **options: Any) -> Path:
    place = folder_of(url)
    open_store(place, cases.manifest())
    assert write_missing(place, cases.needed(rows), teacher or cases.Matrices(batch_tokens=16), **options)
    return place


class Slow(cases.Matrices):
    """Each on a machine of its own. The first is killed in the middle of its first shard."""

    def __init__(self, number: int, scratch: Path) -> None:
        super().__init__(batch_tokens=16)
        self._number, self._scratch = number, scratch

    def answer_rows(self, batch: Any, specs: Any = ()) -> Any:
        time.sleep(0.005)
        if self._number == 0 and self.num_asked:
            while not (self._scratch / "others").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        (self._scratch / ("others" if self._number else "begun")).touch()
        return super().answer_rows(batch, specs)


def test_four_writers_over_one_store_of_which_one_is_killed_leave_the_cache_of_one(
    tmp_path: Path, faulty: type[FaultyStore]
) -> None:
    rows, url = cases.rows_of(LENGTHS), f"faulty://{tmp_path}/store/cache"
    sound = held(cases.write(tmp_path / "sound", rows).folder)

    def writer(number: int) -> None:
        os.environ["XDG_CACHE_HOME"] = str(tmp_path / f"machine-{number}")
        locks.host = lambda: f"machine {number}"  # type: ignore[assignment]
        while number and not (tmp_path / "begun").exists():
            time.sleep(0.01)
        teacher = Slow(number, tmp_path)
        write(url, rows, teacher, patience_seconds=1.5)
        (tmp_path / f"asked-{number}").write_text(str(teacher.num_asked))

    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            os._exit(-tiny.in_child(lambda number=number: writer(number)))  # type: ignore[misc]
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ends == [signal.SIGKILL, 0, 0, 0]
    assert held(tmp_path / "store" / "cache") == sound
    left = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and ".stillroom" in path.parts]
    assert not left, "no claim is left, not even the dead one's"
    asked = [int((tmp_path / f"asked-{number}").read_text()) for number in (1, 2, 3)]
    assert sum(asked) < 2 * len(cases.needed(rows)), "they share the work: each alone would ask for all of it"


def test_a_reader_brings_the_heads_and_then_the_shards_it_reads(
    tmp_path: Path, faulty: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, url = cases.rows_of(LENGTHS), f"faulty://{tmp_path}/store/cache"
    write(url, rows)
    sound = cases.write(tmp_path / "sound", rows)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "reader"))
    cache = Cache(folder_of(url))
    keys = [row.key for row in cases.needed(rows)]
    notes = cache.folder / ".notes"

    def num_heads() -> int:
        return sum(path.read_text().startswith("head") for path in notes.iterdir())

    assert cache.has(keys).all() and cache.counters == sound.counters
    assert num_heads() == len(cache.shards) > 3, "nothing but heads is here"
    assert cases.same(cache.answer(keys[0]), sound.answer(keys[0]))
    assert num_heads() == len(cache.shards) - 1, "one shard was brought"
    faulty.is_away = True
    with pytest.raises(Interrupted) as caught:
        [cache.answer(key) for key in keys]
    assert caught.value.exit_code == 75
    faulty.is_away = False
    assert not list(cache.faults()) and not num_heads()
    assert held(cache.folder) == held(sound.folder)
    for path in (tmp_path / "store" / "cache" / "shards").iterdir():
        path.unlink()
    again = Cache(folder_of(url))
    assert again.has(keys).all(), "what was brought is kept"


def test_a_writer_that_was_cut_off_from_the_store_goes_on_and_asks_nothing_twice(
    tmp_path: Path, faulty: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, url = cases.rows_of(LENGTHS), f"faulty://{tmp_path}/store/cache"
    put = faulty.put_file

    def away_at_the_third(self: FaultyStore, here: str, there: str, **options: Any) -> None:
        faulty.is_away = len(faulty.sent) >= 2
        put(self, here, there, **options)

    monkeypatch.setattr(faulty, "put_file", away_at_the_third)
    first, second = cases.Matrices(batch_tokens=16), cases.Matrices(batch_tokens=16)
    with pytest.raises(CannotSave):
        write(url, rows, first)
    monkeypatch.setattr(faulty, "put_file", put)
    faulty.is_away = False
    write(url, rows, second)
    assert first.num_asked and second.num_asked
    assert first.num_asked + second.num_asked == len(cases.needed(rows)), "each row was asked once"
    sound = cases.write(tmp_path / "sound", rows)
    assert held(tmp_path / "store" / "cache") == held(sound.folder)


def test_a_claim_elsewhere_is_left_to_its_owner_until_nothing_more_is_written(
    tmp_path: Path, faulty: type[FaultyStore]
) -> None:
    rows, url = cases.rows_of(LENGTHS[:9]), f"faulty://{tmp_path}/store/cache"
    place = folder_of(url)
    open_store(place, cases.manifest())
    origin = Origin.of(place)
    assert origin is not None
    for path in shard_paths(cases.write(tmp_path / "sound", rows).folder):
        assert origin.claim(path.stem, "another")
    begun = time.monotonic()
    write(url, rows, patience_seconds=0.3)
    assert time.monotonic() - begun > 0.3 and not origin.claimed()
    assert held(tmp_path / "store" / "cache") == held(tmp_path / "sound")


def test_another_cache_or_other_files_at_the_address_are_refused(tmp_path: Path, faulty: type[FaultyStore]) -> None:
    rows, url = cases.rows_of(LENGTHS[:9]), f"faulty://{tmp_path}/store/cache"
    place = write(url, rows)
    with pytest.raises(ConfigError):
        open_store(place, cases.manifest(weights="another"))
    (tmp_path / "store" / "photo.jpg").write_text("not ours")
    with pytest.raises(ConfigError):
        folder_of(f"faulty://{tmp_path}/store")


def test_a_shard_that_is_cut_short_in_the_store_is_named(tmp_path: Path, faulty: type[FaultyStore]) -> None:
    rows, url = cases.rows_of(LENGTHS[:9]), f"faulty://{tmp_path}/store/cache"
    write(url, rows)
    path = next((tmp_path / "store" / "cache" / "shards").iterdir())
    path.write_bytes(path.read_bytes()[:-5])
    folder = folder_of(url)
    assert [error.what for error in damaged_shards(folder)], "its head says how long it is"
    origin = Origin.of(folder)
    assert origin is not None and origin.store.url == url
