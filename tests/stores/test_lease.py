"""Laws of leases: one owner at a time, and none for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faulty_store import FaultyStore

from stillroom.errors import CannotSave, ConfigError
from stillroom.stores.files import StoreFiles
from stillroom.stores.lease import Lease

NAME = ".stillroom/lease-000000001"


@pytest.fixture
def files(tmp_path: Path, faulty: type[FaultyStore]) -> StoreFiles:
    return StoreFiles(f"faulty://{tmp_path}/store")


def elsewhere(files: StoreFiles, renewed: int = 1) -> None:
    """A lease of another machine."""
    told = {"owner": "other", "renewed": renewed, "host": "far", "name": "far-1", "pid": 7, "started": "then"}
    files.write(NAME, json.dumps(told).encode())


def test_an_address_has_one_owner_until_it_is_released(files: StoreFiles) -> None:
    first = Lease(files).take()
    with pytest.raises(ConfigError, match=r"process \d+ on .* is writing to"):
        Lease(files).take()
    first.check()
    first.release()
    assert files.names() == {}
    Lease(files).take().release()


def test_a_lease_of_a_process_of_this_machine_that_ended_is_taken_at_once(files: StoreFiles) -> None:
    first = Lease(files).take()
    first.release()
    told = json.loads(first._contents()) | {"pid": 2**22 - 7}
    files.write(NAME, json.dumps(told).encode())
    second = Lease(files, sleep=lambda _seconds: pytest.fail("it waits")).take()
    assert list(files.names()) == [".stillroom/lease-000000002"]
    second.release()


def test_a_lease_that_is_not_renewed_is_taken_over_after_its_time(files: StoreFiles) -> None:
    elsewhere(files)
    waited: list[float] = []
    taken = Lease(files, seconds=60, sleep=waited.append).take()
    assert sum(waited) == pytest.approx(60)
    taken.release()


def test_a_lease_that_is_renewed_meanwhile_is_not_taken(files: StoreFiles) -> None:
    elsewhere(files)
    with pytest.raises(ConfigError, match="process 7 on far-1"):
        Lease(files, sleep=lambda _seconds: elsewhere(files, 2)).take()
    assert list(files.names()) == [NAME]


def test_of_two_that_find_an_abandoned_lease_one_gets_it(files: StoreFiles) -> None:
    elsewhere(files)
    others: list[Lease] = []

    def sleep(_seconds: float) -> None:
        if not others:
            others.append(Lease(files, seconds=1, sleep=lambda _seconds: None))
            others[0].take()

    with pytest.raises(ConfigError, match="is writing to"):
        Lease(files, seconds=1, sleep=sleep).take()
    others[0].check()
    others[0].release()


def test_an_owner_that_was_away_too_long_learns_that_it_is_none_any_more(files: StoreFiles) -> None:
    first = Lease(files).take()
    files.create(".stillroom/lease-000000002", b"{}")
    with pytest.raises(CannotSave, match="another process has taken over"):
        first.check()
    files.remove([".stillroom/lease-000000002", NAME])
    with pytest.raises(CannotSave, match="another process has taken over"):
        first.check()
    first.release()


def test_a_lease_is_renewed_while_it_is_held(files: StoreFiles) -> None:
    lease = Lease(files, seconds=0.06).take()
    before = files.read(NAME)
    for _ in range(500):
        if files.read(NAME) != before:
            break
        lease._ended.wait(0.01)
    assert json.loads(files.read(NAME) or b"{}")["renewed"] > json.loads(before or b"{}")["renewed"]
    lease.release()
