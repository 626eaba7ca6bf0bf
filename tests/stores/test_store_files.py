"""Laws of files in a store: what is there is what was sent, and only one creates a file."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from faulty_store import FaultyStore

from stillroom.errors import CannotSave, ConfigError
from stillroom.stores.files import StoreFiles, check_empty


@pytest.fixture
def files(tmp_path: Path, faulty: type[FaultyStore]) -> StoreFiles:
    return StoreFiles(f"faulty://{tmp_path}/store")


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    path = tmp_path / "sent.bin"
    path.write_bytes(bytes(range(256)) * 9)
    return path


def test_a_file_goes_and_comes_back_in_any_store(tmp_path: Path, sent: Path, files: StoreFiles) -> None:
    fsspec.filesystem("memory").store.clear()
    for place in (files, StoreFiles("memory://box/deep")):
        place.put("a/b.bin", sent)
        place.write("c.json", b"{}")
        assert place.names() == {"a/b.bin": 2304, "c.json": 2} and place.read("c.json") == b"{}"
        place.get("a/b.bin", tmp_path / "back.bin")
        assert (tmp_path / "back.bin").read_bytes() == sent.read_bytes()
        place.remove(["a/b.bin", "a/b.bin", "never.there"])
        assert place.names() == {"c.json": 2} and place.size("a/b.bin") is None and place.read("a/b.bin") is None
    fsspec.filesystem("memory").store.clear()


def test_a_torn_upload_is_seen_and_sent_again(files: StoreFiles, sent: Path, faulty: type[FaultyStore]) -> None:
    faulty.torn = ["b.bin"]
    files.put("b.bin", sent)
    assert files.size("b.bin") == 2304 and len(faulty.sent) == 2


def test_bytes_that_changed_on_the_way_are_seen(
    files: StoreFiles, sent: Path, faulty: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        faulty, "put_file", lambda self, here, there: Path(there).write_bytes(b"x" * Path(here).stat().st_size)
    )
    with pytest.raises(CannotSave, match="reads back as something else"):
        files.put("b.bin", sent)


def test_a_store_that_fails_now_and_then_is_asked_again_and_one_that_stays_away_is_named(
    files: StoreFiles, sent: Path, faulty: type[FaultyStore]
) -> None:
    faulty.fail_every = 2
    for name in "abc":
        files.put(name, sent)
    assert set(files.names()) == {"a", "b", "c"}
    faulty.is_away = True
    with pytest.raises(CannotSave, match="in 5 tries: the connection was reset") as caught:
        files.put("d", sent)
    assert caught.value.exit_code == 24


def test_of_two_that_create_a_file_one_does(files: StoreFiles) -> None:
    assert files.creates
    assert files.create("one", b"mine") and not files.create("one", b"yours") and files.read("one") == b"mine"
    assert files.create("one", b"mine"), "the answer to the first try was lost: it is still ours"


def test_a_store_that_ignores_the_condition_is_found_out(files: StoreFiles, faulty: type[FaultyStore]) -> None:
    faulty.ignores_exclusive = True
    assert not files.creates and files.names() == {}
    assert files.create("one", b"mine") and not files.create("one", b"yours"), "as far as a look before can tell"


def test_an_address_with_other_files_is_refused(files: StoreFiles, sent: Path) -> None:
    check_empty(files, [".stillroom/lease-000000001"])
    with pytest.raises(ConfigError, match="holds nothing of ours: photo"):
        check_empty(files, ["photo.jpg"])
