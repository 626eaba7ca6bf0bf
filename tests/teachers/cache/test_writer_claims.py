"""Laws of claims: a dead writer's shard falls to another, a living one's does not, on one machine or on many."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cache_cases as cases
import pytest
import tiny

from stillroom.teachers.cache import claims as claiming
from stillroom.teachers.cache.claims import CLAIMS, Claims
from stillroom.teachers.cache.reader import Cache
from stillroom.teachers.cache.writer import open_store, write_missing

LENGTHS = [3 + (number * 7) % 17 for number in range(120)]
NAME = "00112233445566778899aabb"


class Slow(cases.Matrices):
    def answer_rows(self, batch: Any, specs: Any = ()) -> Any:
        time.sleep(0.004)
        return super().answer_rows(batch, specs)


class Mortal(Slow):
    """Killed by the system in the middle of its first shard, when the others have begun."""

    def __init__(self, begun: Path) -> None:
        super().__init__(batch_tokens=16)
        self._begun = begun

    def answer_rows(self, batch: Any, specs: Any = ()) -> Any:
        if self.num_asked:
            while not (self._begun.parent / "asked-others").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        self._begun.touch()
        return super().answer_rows(batch, specs)


class Other(Slow):
    def answer_rows(self, batch: Any, specs: Any = ()) -> Any:
        self.mark.touch()
        return super().answer_rows(batch, specs)

    mark: Path


def here(_number: int) -> None:
    """All writers on this machine, with its locks."""


def elsewhere(number: int) -> None:
    """Each writer on a machine of its own, on a file system without locks."""
    claiming.fcntl = None  # type: ignore[assignment]
    claiming.host = lambda: f"machine {number}"  # type: ignore[assignment]


@pytest.mark.parametrize("place_writer", [here, elsewhere])
def test_four_writers_of_which_one_is_killed_leave_the_cache_of_one(
    tmp_path: Path, place_writer: Callable[[int], None]
) -> None:
    rows, place = cases.rows_of(LENGTHS), tmp_path / "shared"
    sound = cases.contents(cases.write(tmp_path / "sound", rows).folder)
    open_store(place, cases.manifest())

    def write(number: int) -> None:
        place_writer(number)
        teacher: Slow = Mortal(tmp_path / "begun")
        while number and not (tmp_path / "begun").exists():
            time.sleep(0.01)
        if number:
            teacher = Other(batch_tokens=16)
            teacher.mark = tmp_path / "asked-others"
        assert write_missing(place, cases.needed(rows), teacher, lease_seconds=0.5)
        (tmp_path / f"asked-{number}").write_text(str(teacher.num_asked))

    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            os._exit(-tiny.in_child(lambda number=number: write(number)))  # type: ignore[misc]
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ends == [signal.SIGKILL, 0, 0, 0]
    assert cases.contents(place) == sound
    assert Cache(place).has([row.key for row in cases.needed(rows)]).all()
    asked = [int((tmp_path / f"asked-{number}").read_text()) for number in (1, 2, 3)]
    assert min(asked) > 0


def claim(folder: Path, **told: Any) -> Path:
    path = folder / CLAIMS / NAME
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"owner": "someone", "host": "another machine", "pid": 1, **told}))
    return path


def is_mine(claims: Claims) -> bool:
    with claims.trying(NAME) as mine:
        return mine


def test_a_claim_of_another_machine_holds_while_it_is_renewed(tmp_path: Path) -> None:
    path = claim(tmp_path)
    with Claims(tmp_path, lease_seconds=0.3) as claims:
        for _ in range(6):
            assert not is_mine(claims)
            os.utime(path)
            time.sleep(0.1)


def test_a_claim_of_another_machine_that_is_not_renewed_falls_to_whoever_looks(tmp_path: Path) -> None:
    claim(tmp_path)
    with Claims(tmp_path, lease_seconds=0.1) as claims:
        assert not is_mine(claims)
        time.sleep(0.15)
        assert is_mine(claims)


@pytest.mark.parametrize("hours", [-5, 5])
def test_the_clock_of_the_other_machine_does_not_matter(tmp_path: Path, hours: int) -> None:
    path = claim(tmp_path)
    os.utime(path, (time.time() + 3600 * hours,) * 2)
    with Claims(tmp_path, lease_seconds=60) as claims:
        assert not is_mine(claims) and not is_mine(claims)


def test_a_claim_of_a_dead_process_of_this_machine_falls_at_once(tmp_path: Path) -> None:
    claim(tmp_path, host=claiming.host())
    with Claims(tmp_path, lease_seconds=3600) as claims:
        assert is_mine(claims)


def test_a_half_written_claim_is_waited_for_and_then_taken(tmp_path: Path) -> None:
    claim(tmp_path).write_text('{"own')
    with Claims(tmp_path, lease_seconds=0.1) as claims:
        assert not is_mine(claims)
        time.sleep(0.15)
        assert is_mine(claims)


def test_a_claim_is_renewed_for_as_long_as_its_owner_works(tmp_path: Path) -> None:
    with Claims(tmp_path, lease_seconds=0.3) as claims, claims.trying(NAME) as mine:
        path = tmp_path / CLAIMS / NAME
        assert mine
        before = path.stat().st_mtime_ns
        deadline = time.monotonic() + 30
        while path.stat().st_mtime_ns == before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert path.stat().st_mtime_ns > before


def test_two_writers_in_one_process_do_not_take_each_others_claims(tmp_path: Path) -> None:
    with Claims(tmp_path, lease_seconds=0.01) as one, Claims(tmp_path, lease_seconds=0.01) as other, one.trying(NAME):
        time.sleep(0.05)
        assert not is_mine(other) and not is_mine(other)


def test_nothing_is_left_of_claims_that_were_given_back(tmp_path: Path) -> None:
    with Claims(tmp_path) as claims:
        assert is_mine(claims)
    assert not (tmp_path / CLAIMS).exists()


def test_claims_of_written_shards_are_swept(tmp_path: Path) -> None:
    rows = cases.rows_of([5, 6, 7])
    name = next(iter((cases.write(tmp_path / "a", rows).folder / "shards").iterdir())).stem
    open_store(tmp_path / "b", cases.manifest())
    claim(tmp_path / "b").rename(tmp_path / "b" / CLAIMS / "stays")
    claim(tmp_path / "b").rename(tmp_path / "b" / CLAIMS / name)
    with Claims(tmp_path / "b") as claims:
        claims.sweep({name})
    assert [path.name for path in (tmp_path / "b" / CLAIMS).iterdir()] == ["stays"]


def test_a_writer_that_was_stopped_for_too_long_does_no_harm(tmp_path: Path) -> None:
    """Its claim was taken over, its shard written, and what it had laid aside removed: it ends without an error."""
    rows = cases.rows_of(LENGTHS[:20])
    sound = cases.contents(cases.write(tmp_path / "sound", rows).folder)
    place = tmp_path / "shared"
    open_store(place, cases.manifest())
    replaced = Path.replace

    def overtaken(self: Path, target: Any) -> Path:
        """Between writing aside and renaming, another writer does all the work."""
        Path.replace = replaced  # type: ignore[method-assign]
        Path(target).write_bytes(self.read_bytes())
        self.unlink()
        return replaced(self, target)

    Path.replace = overtaken  # type: ignore[method-assign]
    try:
        assert write_missing(place, cases.needed(rows), cases.Matrices())
    finally:
        Path.replace = replaced  # type: ignore[method-assign]
    assert cases.contents(place) == sound
