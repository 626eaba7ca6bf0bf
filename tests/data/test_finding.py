"""Files, globs and folders: what is found, in which order, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import fsspec
import pytest

from stillroom.core.errors import DataError
from stillroom.data.records import Tally
from stillroom.data.sources import locate, read_files


def fill(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"text": f"text {number} of {name}"}).encode() + b"\n"
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def refusal(spec: str) -> DataError:
    with pytest.raises(DataError) as caught:
        locate(spec)
    assert caught.value.exit_code == 2 and caught.value.advice
    return caught.value


def test_a_folder_is_all_its_data_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    fill(tmp_path, "b.jsonl", "a/z.jsonl.gz", "a/y.jsonl", ".hidden.jsonl", ".git/x.jsonl")
    assert [path.relative_to(tmp_path).as_posix() for path in locate(str(tmp_path))] == [
        "a/y.jsonl",
        "a/z.jsonl.gz",
        "b.jsonl",
    ]
    assert [where for where, _ in read_files(str(tmp_path), Tally())] == [
        "a/y.jsonl:1",
        "a/z.jsonl.gz:1",
        "b.jsonl:1",
    ]


def test_files_of_a_folder_that_are_not_read_are_told(tmp_path: Path) -> None:
    fill(tmp_path, "a.jsonl", "README.md", "LICENSE")
    tally = Tally()
    assert len(list(read_files(str(tmp_path), tally))) == 1
    assert any("2 files of the folder" in note and "LICENSE, README.md" in note for note in tally.notes)


def test_a_folder_of_several_kinds_is_refused_with_globs(tmp_path: Path) -> None:
    fill(tmp_path, "a.jsonl", "b.jsonl.gz", "readme.txt")
    error = refusal(str(tmp_path))
    assert ".jsonl (2), .txt (1)" in error.what
    assert any("*.jsonl" in advice for advice in error.advice)


def test_a_glob_as_advised_finds_compressed_files_too(tmp_path: Path) -> None:
    fill(tmp_path, "a.jsonl", "b.jsonl.gz", "c/d.jsonl", "readme.txt")
    glob = refusal(str(tmp_path)).advice[0].split("'")[1]
    assert [path.name for path in locate(glob)] == ["a.jsonl", "b.jsonl.gz", "d.jsonl"]


def test_a_glob_as_advised_finds_no_file_of_a_longer_suffix(tmp_path: Path) -> None:
    fill(tmp_path, "a.json", "b.jsonl")
    globs = [advice.split("'")[1] for advice in refusal(str(tmp_path)).advice]
    assert [[path.name for path in locate(glob)] for glob in globs] == [["a.json"], ["b.jsonl"]]


def test_a_folder_without_data_is_refused_with_what_is_read(tmp_path: Path) -> None:
    fill(tmp_path, "README.md")
    error = refusal(str(tmp_path))
    assert "without data files" in error.what and ".jsonl" in error.advice[0] and ".zst" in error.advice[0]


def test_a_compressed_file_of_no_format_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, "a.gz", "b.xml.gz")
    assert "'of no kind'" in refusal(str(tmp_path / "a.gz")).what
    assert "'.xml'" in refusal(str(tmp_path / "b.xml.gz")).what


def test_data_behind_a_url_is_read_as_the_same_files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "copies"))
    store, here = fsspec.filesystem("memory"), tmp_path / "here"
    (here / "deep").mkdir(parents=True)
    for name in ("a.jsonl", "deep/b.jsonl"):
        (here / name).write_text('{"text": "' + name + '"}\n')
        store.pipe_file(f"/bucket/{name}", (here / name).read_bytes())
    try:
        for below in ("", "/a.jsonl", "/**/*.jsonl"):
            read = [list(read_files(f"{root}{below}", Tally())) for root in (str(here), "memory://bucket")]
            assert read[0] == read[1] and read[0]
    finally:
        store.store.clear()
