"""Laws of the mirror: a store is at every moment a folder that can be gone on from, and no store ends a run."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from faulty_store import FaultyStore

from stillroom.errors import CannotSave
from stillroom.stores import mirror as mirroring
from stillroom.stores.files import StoreFiles
from stillroom.stores.lease import Lease
from stillroom.stores.mirror import Mirror


class Log:
    """What a mirror needs of a log."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.handle: Any = None

    def listen(self, handle: Any) -> None:
        self.handle = handle

    def write(self, _event: str, text: str) -> None:
        self.notes.append(text)


class World:
    """A folder with checkpoints, the store that it is sent to, and a mirror."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "home" / "run"
        self.folder.mkdir(parents=True)
        self.store = tmp_path / "store"
        self.files = StoreFiles(f"faulty://{self.store}")
        self.lease = Lease(self.files).take()
        self.log = Log()
        self.put("config.json", "{}")
        self.mirror = self.opened()

    def opened(self) -> Mirror:
        mirror = Mirror(self.files, self.folder, self.folder.parent, self.lease)
        mirror.attach(self.log)
        return mirror

    def put(self, name: str, contents: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # files of a run are replaced, not written to again
        path.write_text(contents)

    def checkpoint(self, step: int, contents: str = "") -> None:
        place = f"checkpoints/step-{step:06d}"
        self.put(f"{place}/student.safetensors", contents or f"weights of {step}")
        self.put(f"{place}/manifest.json", json.dumps({"step": step, "of": contents}))
        self.put("events.jsonl", f"events until {step}")

    def event(self, name: str = "checkpoint") -> None:
        self.mirror.handle({"event": name})

    def there(self) -> dict[str, str]:
        return {
            path.relative_to(self.store).as_posix(): path.read_text()
            for path in sorted(self.store.rglob("*"))
            if path.is_file() and ".stillroom" not in path.parts
        }

    def here(self) -> dict[str, str]:
        return {
            path.relative_to(self.folder).as_posix(): path.read_text()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }


@pytest.fixture
def world(tmp_path: Path, faulty: type[FaultyStore]) -> Any:
    made = World(tmp_path)
    yield made
    made.mirror.wait()
    made.lease.release()


def test_a_commit_brings_the_store_to_the_folders_state_and_old_checkpoints_go(world: World) -> None:
    for step in (1, 2):
        world.checkpoint(step)
        world.event()
        world.mirror.wait()
        assert world.there() == world.here()
    for path in sorted((world.folder / "checkpoints" / "step-000001").iterdir()):
        path.unlink()
    world.checkpoint(3)
    world.put("student/model.safetensors", "the student")
    world.put("summary.json", "done")
    world.put("run.lock", "of this machine")
    world.put(".tmp-half/thing", "half")
    world.mirror.finish()
    (world.folder / "run.lock").unlink()
    (world.folder / ".tmp-half" / "thing").unlink()
    assert world.there() == world.here() and not any("step-000001" in name for name in world.there())


def test_what_vouches_for_others_is_sent_after_them(world: World, faulty: type[FaultyStore]) -> None:
    world.checkpoint(1)
    world.put("summary.json", "done")
    world.put("student/model.safetensors", "the student")
    world.mirror.finish()
    order = [name.rpartition("store/")[2] for name in faulty.sent]
    place = order.index("checkpoints/step-000001/manifest.json")
    assert order[-1] == "summary.json" and place == len(order) - 2
    assert order.index("events.jsonl") < place, "a checkpoint knows its place in the log"


def test_a_file_is_sent_once_also_by_the_next_process(world: World, faulty: type[FaultyStore]) -> None:
    world.checkpoint(1)
    world.mirror.finish()
    sent = len(faulty.sent)
    world.mirror.finish()
    world.mirror = world.opened()
    world.mirror.finish()
    assert len(faulty.sent) == sent


def test_a_checkpoint_that_is_saved_again_is_never_vouched_for_by_the_old_manifest(
    world: World, faulty: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.checkpoint(1)
    world.mirror.finish()
    world.checkpoint(1, "of another line")
    put = faulty.put_file

    def kill(self: FaultyStore, here: str, there: str) -> None:
        put(self, here, there)
        if there.endswith("student.safetensors"):
            assert "checkpoints/step-000001/manifest.json" not in world.there()

    monkeypatch.setattr(faulty, "put_file", kill)
    world.mirror.finish()
    assert world.there() == world.here()


def test_a_store_that_stays_away_is_said_once_and_gets_all_of_it_later(world: World, faulty: type[FaultyStore]) -> None:
    faulty.is_away = True
    for step in (1, 2, 3):
        world.checkpoint(step)
        world.event()
        world.mirror.wait()
    world.event("step")
    assert world.mirror.num_failed == 3 and len(world.log.notes) == 1
    assert "is not up to date, and the run goes on" in world.log.notes[0]
    faulty.is_away = False
    world.event("eval")
    world.mirror.wait()
    world.event("step")
    assert world.there() == world.here() and "takes files again, after 3 failed commits" in world.log.notes[1]


def test_a_store_that_is_away_at_the_end_is_an_error_that_names_the_folder(
    world: World, faulty: type[FaultyStore]
) -> None:
    world.checkpoint(1)
    faulty.is_away = True
    with pytest.raises(CannotSave, match="does not have all of the run") as caught:
        world.mirror.finish()
    assert caught.value.exit_code == 24 and str(world.folder) in str(caught.value)
    faulty.is_away = False
    world.mirror.finish()
    assert world.there() == world.here()


def test_a_checkpoint_that_is_pruned_while_it_is_sent_arrives_whole(
    world: World, faulty: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    put = faulty.put_file

    def slow(self: FaultyStore, here: str, there: str) -> None:
        begun.set()
        assert go.wait(10)
        put(self, here, there)

    monkeypatch.setattr(faulty, "put_file", slow)
    world.checkpoint(1)
    world.event()
    assert begun.wait(10)
    for path in (world.folder / "checkpoints" / "step-000001").iterdir():
        path.unlink()
    (world.folder / "events.jsonl").write_text("a longer log that goes on in place")
    go.set()
    world.mirror.wait()
    there = world.there()
    assert there["checkpoints/step-000001/student.safetensors"] == "weights of 1"
    assert there["events.jsonl"] == "events until 1", "the log as it was at the commit"


def test_a_checkpoint_that_is_replaced_while_it_is_put_aside_is_taken_whole(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.checkpoint(1, "of one line")
    other, link = world.folder.parent / "other", mirroring.os.link

    def replaced(here: Path, there: Path) -> None:
        link(here, there)
        if other.exists() and here.name == "manifest.json":  # the first of its files
            place = world.folder / "checkpoints" / "step-000001"
            place.rename(world.folder.parent / "gone")
            other.rename(place)

    world.checkpoint(2, "of another line")
    (world.folder / "checkpoints" / "step-000002").rename(other)
    monkeypatch.setattr(mirroring.os, "link", replaced)
    world.mirror.finish()
    held = {name: text for name, text in world.there().items() if name.startswith("checkpoints/")}
    assert {"of another line" in text for text in held.values()} == {True} and len(held) == 2


def test_a_run_whose_lease_was_taken_over_writes_nothing_more_and_ends(world: World, faulty: type[FaultyStore]) -> None:
    world.checkpoint(1)
    world.mirror.finish()
    before = world.there()
    world.files.create(".stillroom/lease-000000002", b"{}")
    world.checkpoint(2)
    world.event()
    world.mirror.wait()
    with pytest.raises(CannotSave, match="another process has taken over"):
        world.event("step")
    assert world.there() == before


def test_a_run_that_could_not_begin_leaves_nothing(world: World) -> None:
    (world.folder / "config.json").unlink()
    world.mirror.finish()
    assert world.there() == {}
