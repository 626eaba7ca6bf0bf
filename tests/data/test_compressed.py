"""Compressed files: read like plain ones, damaged ones named with the place, bombs refused with numbers."""

from __future__ import annotations

import gzip
import json
import os
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from stillroom.core.errors import DataError
from stillroom.data import sources
from stillroom.data.records import Tally
from stillroom.data.sources import data_suffix, open_bytes, read_files, register

VALUES = [{"prompt": f"{n}?", "completion": f"yes, {n}."} for n in range(700)]
PLAIN = {
    "a.jsonl": "".join(json.dumps(value) + "\n" for value in VALUES).encode(),
    "a.json": json.dumps(VALUES).encode(),
    "a.csv": b"prompt,completion\n" + "".join(f'{v["prompt"]},"{v["completion"]}"\n' for v in VALUES).encode(),
}
ENDINGS = [".gz", ".zst"]


def packed(content: bytes, ending: str) -> bytes:
    if ending == ".gz":
        return gzip.compress(content)
    return bytes(pyarrow.Codec("zstd").compress(content, asbytes=True))


def written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def values_of(spec: str) -> list[object]:
    return [value for _, value in read_files(spec, Tally())]


def refusal(spec: str) -> DataError:
    with pytest.raises(DataError) as caught:
        values_of(spec)
    assert caught.value.exit_code == 2 and caught.value.advice
    return caught.value


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", PLAIN)
def test_a_compressed_file_holds_what_the_plain_one_holds(tmp_path: Path, name: str, ending: str) -> None:
    plain = values_of(written(tmp_path / name, PLAIN[name]))
    assert plain == VALUES
    assert values_of(written(tmp_path / (name + ending), packed(PLAIN[name], ending))) == plain


@pytest.mark.parametrize("ending", ENDINGS)
def test_compressed_text_is_cut_at_its_breaks(tmp_path: Path, ending: str) -> None:
    text = b"\xef\xbb\xbfone\ntwo\n<|endoftext|>\n\nthree\n \x0c \nfour"
    items = list(read_files(written(tmp_path / f"a.txt{ending}", packed(text, ending)), Tally()))
    wheres = [f"a.txt{ending}:{line}" for line in (1, 4, 7)]
    assert items == list(zip(wheres, [{"text": "one\ntwo\n"}, {"text": "\nthree\n"}, {"text": "four"}], strict=True))


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_compressed_parquet_file_is_read(tmp_path: Path, ending: str) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(VALUES), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    assert values_of(written(tmp_path / f"a.parquet{ending}", packed(content, ending))) == VALUES


@pytest.mark.parametrize("ending", ENDINGS)
def test_several_streams_in_one_file_are_all_read(tmp_path: Path, ending: str) -> None:
    """`cat a.gz b.gz > c.gz` is a usual way to join files."""
    halves = PLAIN["a.jsonl"].splitlines(keepends=True)
    content = packed(b"".join(halves[:300]), ending) + packed(b"".join(halves[300:]), ending)
    assert values_of(written(tmp_path / f"a.jsonl{ending}", content)) == VALUES


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet"])
def test_a_file_that_is_cut_off_is_named_with_the_place(tmp_path: Path, name: str, ending: str) -> None:
    content = packed(os.urandom(400_000).hex().encode(), ending)
    error = refusal(written(tmp_path / (name + ending), content[: len(content) // 2]))
    assert f"{name}{ending} is cut off" in error.what and "bytes of its content could be read" in error.what
    num_read = int(error.what.rpartition(": ")[2].split()[0].replace(",", ""))
    assert 200_000 < num_read < 500_000


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_damaged_or_mistaken_file_is_named(tmp_path: Path, ending: str) -> None:
    assert "is damaged or no" in refusal(written(tmp_path / f"a.jsonl{ending}", b"this is plain text\n" * 9)).what
    content = bytearray(packed(os.urandom(100_000).hex().encode(), ending))
    content[12:76] = b"\xff" * 64  # in the first block: what follows cannot be decoded, checksum or not
    assert f"b.jsonl{ending}" in refusal(written(tmp_path / f"b.jsonl{ending}", bytes(content))).what


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_empty_compressed_file_is_empty(tmp_path: Path, ending: str) -> None:
    assert "is empty" in refusal(written(tmp_path / f"a.jsonl{ending}", packed(b"", ending))).what


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet"])
def test_a_file_that_expands_without_end_is_refused_with_numbers(
    tmp_path: Path, name: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "FREE_BYTES", 4 << 20)
    bomb = packed(bytes(64 << 20), ending)
    spec = written(tmp_path / (name + ending), bomb)
    tracemalloc.start()
    error = refusal(spec)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    bound = max(4 << 20, sources.MAX_EXPANSION * len(bomb))
    assert f"has {len(bomb):,} bytes and expands to more than {bound:,}" in error.what
    assert any("decompress it" in advice for advice in error.advice)
    assert peak < 3 * bound


def test_a_reader_of_another_package_is_not_handed_compressed_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stillroom.config.schema import READERS

    monkeypatch.setattr(READERS, "_things", dict(READERS._things))
    register(".md", lambda path, name, tally: iter([(name, {"text": path.read_text()})]))
    error = refusal(written(tmp_path / "a.md.gz", packed(b"# a", ".gz")))
    assert "is compressed" in error.what and "decompress it" in error.advice[0]


def test_a_missing_package_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = written(tmp_path / "a.jsonl.zst", packed(PLAIN["a.jsonl"], ".zst"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    error = refusal(spec)
    assert error.what == "pyarrow is not installed" and error.advice[0] == "pip install pyarrow"


def test_the_format_is_the_suffix_before_the_compression(tmp_path: Path) -> None:
    assert [data_suffix(name) for name in ("a.jsonl", "b.JSONL.GZ", "c.gz", "d.x.zst")] == [
        ".jsonl",
        ".jsonl",
        "",
        ".x",
    ]
    with open_bytes(Path(written(tmp_path / "a.txt.gz", packed(b"one\ntwo\n", ".gz")))) as file:
        assert file.readlines() == [b"one\n", b"two\n"]
