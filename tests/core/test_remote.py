"""Laws of files behind URLs: a copy is whole, is the store's file, and is made once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from stillroom.core import remote
from stillroom.core.errors import ConfigError, DataError
from stillroom.core.files import is_url
from stillroom.core.remote import local_copy, refuse_url


@pytest.fixture(autouse=True)
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_PAUSE", 0.0)
    return tmp_path / "cache" / "stillroom" / "copies"


@pytest.fixture
def memory() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


class Flaky(LocalFileSystem):  # type: ignore[misc]
    """The local file system with faults that are used up, one a copy."""

    protocol = "flaky"
    cachable = False
    faults: list[str] = []  # noqa: RUF012
    num_copied = 0

    def get_file(self, path: str, into: str, **options: Any) -> None:
        Flaky.num_copied += 1
        match Flaky.faults.pop(0) if Flaky.faults else "":
            case "error":
                raise OSError("the connection was reset")
            case "cut":
                Path(into).write_bytes(Path(self._strip_protocol(path)).read_bytes()[:3])
            case _:
                super().get_file(path, into, **options)


@pytest.fixture
def flaky() -> Iterator[type[Flaky]]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.faults, Flaky.num_copied = [], 0
    yield Flaky
    Flaky.faults = []


def held(folder: Path) -> dict[str, bytes]:
    """The files of a copy, without those that it keeps for itself."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.relative_to(folder).as_posix().startswith(".")
    }


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("s3://bucket/a", True), ("hf://datasets/a/b.jsonl", True), ("memory://a", True), ("s3:/bucket/a", True),
        ("hf:org/name", False), ("builtin:stdlib", False), ("data/a.jsonl", False), ("C:/data", False),
    ],
)  # fmt: skip
def test_a_url_is_told_from_a_path_and_a_prefix(text: str, is_one: bool) -> None:
    assert is_url(text) == is_one


def test_a_file_a_glob_and_a_folder_are_copied_by_their_names(memory: Any) -> None:
    for name in ("box/a.jsonl", "box/deep/b.jsonl", "box/deep/c.txt", "box/.hidden"):
        memory.pipe(f"/{name}", name.encode())
    assert held(local_copy("memory://box/a.jsonl")) == {"a.jsonl": b"box/a.jsonl"}
    assert held(local_copy("memory://box/**/*.jsonl")).keys() >= {"deep/b.jsonl"}
    assert held(local_copy("memory://box")).keys() == {"a.jsonl", "deep/b.jsonl", "deep/c.txt"}


def test_a_file_is_copied_once_and_again_when_it_changed(tmp_path: Path, flaky: type[Flaky]) -> None:
    place = tmp_path / "store"
    place.mkdir()
    for name in ("a", "b"):
        (place / name).write_text(f"old {name}")
    folder = local_copy(f"flaky://{place}")
    assert local_copy(f"flaky://{place}") == folder and flaky.num_copied == 2
    (place / "a").write_text("new a")
    os.utime(place / "a", (1, 1))
    assert held(local_copy(f"flaky://{place}")) == {"a": b"new a", "b": b"old b"} and flaky.num_copied == 3


def test_a_file_that_is_gone_from_the_store_is_gone_from_the_copy(memory: Any) -> None:
    memory.pipe({"/box/a": b"a", "/box/b": b"b"})
    local_copy("memory://box")
    memory.rm("/box/a")
    assert held(local_copy("memory://box")) == {"b": b"b"}


@pytest.mark.parametrize("fault", ["error", "cut"])
def test_a_store_that_fails_for_a_moment_is_asked_again(tmp_path: Path, flaky: type[Flaky], fault: str) -> None:
    (tmp_path / "one.txt").write_text("a whole file")
    flaky.faults = [fault, fault]
    assert held(local_copy(f"flaky://{tmp_path}/one.txt")) == {"one.txt": b"a whole file"}
    assert flaky.num_copied == 3


@pytest.mark.parametrize("fault", ["error", "cut"])
def test_a_store_that_keeps_failing_leaves_nothing_behind(
    tmp_path: Path, flaky: type[Flaky], copies: Path, fault: str
) -> None:
    (tmp_path / "one.txt").write_text("a whole file")
    flaky.faults = [fault] * 100
    with pytest.raises(DataError) as caught:
        local_copy(f"flaky://{tmp_path}/one.txt")
    assert caught.value.exit_code == 2
    assert not [path for path in copies.rglob("*one*") if path.is_file()]


def test_a_copy_that_was_damaged_here_is_made_again(tmp_path: Path, flaky: type[Flaky]) -> None:
    (tmp_path / "one.txt").write_text("a whole file")
    folder = local_copy(f"flaky://{tmp_path}/one.txt")
    (folder / "one.txt").write_text("a wh")
    assert held(local_copy(f"flaky://{tmp_path}/one.txt")) == {"one.txt": b"a whole file"}


def test_what_is_not_there_is_named(memory: Any) -> None:
    with pytest.raises(DataError) as caught:
        local_copy("memory://nowhere")
    assert "memory://nowhere" in caught.value.what


@pytest.mark.parametrize("url", ["gs://bucket/a", "nosuch://a"])
def test_a_store_that_is_unknown_or_not_installed_is_named(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        local_copy(url)
    assert url.partition("/")[0] in caught.value.what


def test_a_secret_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        local_copy("s3://me:sesame@bucket/a")
    assert "sesame" not in str(caught.value)


def test_a_folder_to_write_to_is_refused_with_what_the_store_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_url(Path("s3://bucket/run"), "a run", "--out")
    assert caught.value.where == "--out" and caught.value.advice
    refuse_url(tmp_path, "a run", "--out")
