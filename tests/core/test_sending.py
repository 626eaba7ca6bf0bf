"""Laws of sending: a store is at every moment a folder to go on from, has one writer, and ends no run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from faulty_store import FaultyStore

from stillroom.core.errors import CannotSave, ConfigError
from stillroom.core.files import sum_of_file
from stillroom.core.locks import describe_process
from stillroom.core.remote import OWNER, Owner, Sender, Store, read_commit


@pytest.fixture
def store(tmp_path: Path, faulty: type[FaultyStore]) -> Store:
    return Store(f"faulty://{tmp_path}/store")


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    path = tmp_path / "sent.bin"
    path.write_bytes(bytes(range(256)) * 9)
    return path


# -- files -----------------------------------------------------------------------------------------------


def test_a_file_goes_and_comes_back_in_any_store(tmp_path: Path, sent: Path, store: Store) -> None:
    fsspec.filesystem("memory").store.clear()
    for place in (store, Store("memory://box/deep")):
        place.put("a/b.bin", sent)
        place.write("c.json", b"{}")
        assert {name: file.size for name, file in place.entries().items()} == {"a/b.bin": 2304, "c.json": 2}
        place.get("a/b.bin", tmp_path / "back.bin")
        assert (tmp_path / "back.bin").read_bytes() == sent.read_bytes() and place.read("c.json") == b"{}"
        place.remove(["a/b.bin", "a/b.bin", "never.there"])
        assert list(place.entries()) == ["c.json"] and place.size("a/b.bin") is None and place.read("a/b.bin") is None
    fsspec.filesystem("memory").store.clear()


# What a store does, whether the file arrives all the same, and how often it is sent.
FAULTS: dict[str, tuple[dict[str, Any], bool, int]] = {
    "torn": ({"torn": ["b.bin"]}, True, 2),
    "dropped": ({"fail_every": 1, "recovers_after": 2}, True, 3),
    "away": ({"fail_every": 1}, False, 5),
    "changed": ({"changed": ["b.bin"]}, False, 5),
    "refused": ({"is_refused": True}, False, 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_there_is_what_was_sent_or_an_error(
    store: Store, sent: Path, faulty: type[FaultyStore], fault: str
) -> None:
    settings, arrives, num_sent = FAULTS[fault]
    for name, value in settings.items():
        setattr(faulty, name, value)
    if arrives:
        store.put("b.bin", sent)
        assert store.read("b.bin") == sent.read_bytes()
    else:
        with pytest.raises(CannotSave) as caught:
            store.put("b.bin", sent)
        assert caught.value.exit_code == 24
    assert len(faulty.sent) == num_sent


def test_of_two_that_create_a_file_one_does(store: Store) -> None:
    assert store.create("one", b"mine") and not store.create("one", b"yours") and store.read("one") == b"mine"
    assert store.create("one", b"mine"), "the answer to the first try was lost: it is still ours"


def test_an_address_with_other_files_is_refused(store: Store) -> None:
    store.check_empty([OWNER])
    with pytest.raises(ConfigError):
        store.check_empty([OWNER, "photo.jpg"])


# -- one owner -------------------------------------------------------------------------------------------


def told(store: Store) -> dict[str, Any]:
    return dict(json.loads(store.read(OWNER) or b"{}"))


def elsewhere(store: Store, renewed: int = 1) -> None:
    """An owner on another machine."""
    other = {"token": "other", "renewed": renewed, "host": "far", "name": "far-1", "pid": 7, "started": "then"}
    store.write(OWNER, json.dumps(other).encode())


def test_an_address_has_one_owner_until_it_is_released(store: Store) -> None:
    first = Owner(store).take()
    with pytest.raises(ConfigError) as caught:
        Owner(store).take()
    assert caught.value.exit_code == 2 and str(describe_process()["pid"]) in caught.value.what
    first.check()
    first.release()
    assert store.entries() == {}
    Owner(store).take().release()


def test_an_owner_of_this_machine_that_ended_is_replaced_at_once(store: Store) -> None:
    store.write(OWNER, json.dumps({"token": "x", **describe_process(), "pid": 2**22 - 7}).encode())
    owner = Owner(store, sleep=lambda _seconds: pytest.fail("it waits")).take()
    assert list(store.entries()) == [OWNER] and told(store)["token"] == owner.token
    owner.release()


def test_an_owner_elsewhere_is_replaced_once_it_was_silent_for_its_time(store: Store) -> None:
    elsewhere(store)
    waited: list[float] = []
    Owner(store, seconds=60, sleep=waited.append).take().release()
    assert sum(waited) == pytest.approx(60)


def test_an_owner_that_is_heard_of_meanwhile_is_not_replaced(store: Store) -> None:
    elsewhere(store)
    with pytest.raises(ConfigError):
        Owner(store, sleep=lambda _seconds: elsewhere(store, 2)).take()
    assert told(store)["renewed"] == 2


def test_of_two_that_find_an_owner_silent_one_replaces_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(store)
    others: list[Owner] = []
    create = Store.create

    def overtaken(self: Store, name: str, contents: bytes, **options: Any) -> bool:
        """Between finding it silent and replacing it, another does so."""
        if "taken-" in name and not others:
            others.append(Owner(store, seconds=1, sleep=lambda _seconds: None))
            others[0].take()
        return create(self, name, contents, **options)

    monkeypatch.setattr(Store, "create", overtaken)
    with pytest.raises(ConfigError):
        Owner(store, seconds=1, sleep=lambda _seconds: None).take()
    others[0].check()
    others[0].release()
    assert store.entries() == {}


def test_an_owner_that_was_silent_too_long_learns_that_it_is_none_any_more(store: Store) -> None:
    first = Owner(store).take()
    elsewhere(store)
    with pytest.raises(CannotSave):
        first.check()
    first.release()
    assert told(store)["token"] == "other", "it removes nothing of another's"
    store.remove([OWNER])
    with pytest.raises(CannotSave):
        first.check()


def test_an_owner_is_heard_of_while_it_holds(store: Store) -> None:
    owner = Owner(store, seconds=0.06).take()
    before = told(store)["renewed"]
    for _ in range(500):
        if told(store).get("renewed", before) > before:
            break
        threading.Event().wait(0.01)
    assert told(store)["renewed"] > before
    owner.release()


def test_a_store_that_ignores_the_condition_is_found_out(store: Store, faulty: type[FaultyStore]) -> None:
    faulty.ignores_exclusive = True
    owner = Owner(store).take()
    assert not owner.is_exclusive and told(store)["token"] == owner.token
    with pytest.raises(ConfigError):
        Owner(store).take()
    owner.release()


# -- a run is sent ---------------------------------------------------------------------------------------


class World:
    """A folder with checkpoints, the store that it is sent to, and a log."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder, self.there = tmp_path / "home" / "run", tmp_path / "store"
        self.folder.mkdir(parents=True)
        self.store = Store(f"faulty://{self.there}")
        self.owner = Owner(self.store).take()
        self.notes: list[str] = []
        self.put("config.json", "{}")
        self.sender = self.opened()

    def opened(self) -> Sender:
        commit = read_commit(self.store)
        sender = Sender(self.store, self.folder, self.owner, commit.files if commit else {})
        sender.attach(self)
        return sender

    def listen(self, _handle: Any) -> None:
        """As a log does."""

    def write(self, _event: str, text: str) -> None:
        self.notes.append(text)

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
        self.sender.handle({"event": name})

    def sent(self) -> dict[str, str]:
        return _files(self.there)

    def here(self) -> dict[str, str]:
        return _files(self.folder)


def _files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".stillroom" not in path.parts
    }


@pytest.fixture
def world(tmp_path: Path, faulty: type[FaultyStore]) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.sender.wait()
    made.owner.release()


def test_each_checkpoint_brings_the_store_to_the_folders_state_and_old_ones_go(world: World) -> None:
    for step in (1, 2):
        world.checkpoint(step)
        world.event()
        world.sender.wait()
        assert world.sent() == world.here()
    for path in sorted((world.folder / "checkpoints" / "step-000001").iterdir()):
        path.unlink()
    world.checkpoint(3)
    world.put("student/model.safetensors", "the student")
    world.put("summary.json", "done")
    expected = world.here()
    world.put("run.lock", "of this machine")
    world.put(".tmp-half/thing", "half")
    world.sender.finish()
    assert world.sent() == expected and not any("step-000001" in name for name in expected)
    commit = read_commit(world.store)
    assert commit is not None and commit.files == {name: sum_of_file(world.folder / name) for name in expected}


def test_what_vouches_for_others_is_sent_after_them(world: World, faulty: type[FaultyStore]) -> None:
    world.checkpoint(1)
    world.put("summary.json", "done")
    world.put("student/model.safetensors", "the student")
    world.sender.finish()
    order = [name.rpartition("store/")[2] for name in faulty.sent]
    place = order.index("checkpoints/step-000001/manifest.json")
    assert order[-1] == "summary.json" and place == len(order) - 2
    assert order.index("events.jsonl") < place, "a checkpoint knows its place in the log"


def test_a_file_is_sent_once_also_by_the_next_process(world: World, faulty: type[FaultyStore]) -> None:
    world.checkpoint(1)
    world.sender.finish()
    sent = len(faulty.sent)
    world.sender.finish()
    world.opened().finish()
    assert len(faulty.sent) == sent


def test_a_checkpoint_that_is_saved_again_is_never_vouched_for_by_the_old_manifest(
    world: World, faulty: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.checkpoint(1)
    world.sender.finish()
    world.checkpoint(1, "of another line")
    put = faulty.put_file

    def looks(self: FaultyStore, here: str, there: str) -> None:
        put(self, here, there)
        if there.endswith("student.safetensors"):
            assert "checkpoints/step-000001/manifest.json" not in world.sent()

    monkeypatch.setattr(faulty, "put_file", looks)
    world.sender.finish()
    assert world.sent() == world.here()


def test_a_store_that_stays_away_is_said_once_and_gets_all_of_it_later(world: World, faulty: type[FaultyStore]) -> None:
    faulty.is_away = True
    for step in (1, 2, 3):
        world.checkpoint(step)
        world.event()
        world.sender.wait()
    world.event("step")
    assert world.sender.num_failed == 3 and len(world.notes) == 1
    faulty.is_away = False
    world.event()
    world.sender.wait()
    world.event("step")
    assert world.sent() == world.here() and len(world.notes) == 2


def test_a_store_that_is_away_at_the_end_is_an_error_that_names_the_folder(
    world: World, faulty: type[FaultyStore]
) -> None:
    world.checkpoint(1)
    faulty.is_away = True
    with pytest.raises(CannotSave) as caught:
        world.sender.finish()
    assert caught.value.exit_code == 24 and caught.value.where == str(world.folder)
    faulty.is_away = False
    world.sender.finish()
    assert world.sent() == world.here()


def test_a_checkpoint_that_is_removed_while_it_is_sent_arrives_whole(
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
    world.event()  # a second one does not wait for the first
    go.set()
    world.sender.wait()
    assert world.sent()["checkpoints/step-000001/student.safetensors"] == "weights of 1"
    assert world.sent()["events.jsonl"] == "events until 1", "the log as it was at the checkpoint"


def test_a_run_that_was_taken_over_sends_nothing_more_and_ends(world: World) -> None:
    world.checkpoint(1)
    world.sender.finish()
    before = world.sent()
    elsewhere(world.store)
    world.checkpoint(2)
    world.event()
    world.sender.wait()
    with pytest.raises(CannotSave):
        world.event("step")
    assert world.sent() == before


def test_a_run_that_could_not_begin_leaves_nothing(world: World) -> None:
    (world.folder / "config.json").unlink()
    world.sender.finish()
    assert world.sent() == {}
