"""Laws of reading a GGUF header: what is not whole is refused, never read past its end."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf_files
import pytest
import tiny

from stillroom.core.errors import BrokenAtStart
from stillroom.models.gguf import read_header


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.save_model(tmp_path_factory.mktemp("gguf") / "model", "llama", num_layers=1)
    return gguf_files.write(folder, folder.parent / "model.gguf")


def refused(path: Path) -> bool:
    with pytest.raises(BrokenAtStart) as caught:
        read_header(path)
    return caught.value.exit_code == 20 and bool(caught.value.advice)


def test_fields_and_tensors_are_read(file: Path) -> None:
    header = read_header(file)
    assert header.architecture == "llama" and header.own("block_count") == 1
    assert header.num_tokens == tiny.VOCAB
    assert header.tensors["token_embd.weight"].num_elements == tiny.VOCAB * 32
    end = max(tensor.offset + 4 * tensor.num_elements for tensor in header.tensors.values())
    assert end <= header.num_bytes < end + 64, "offsets are those of the file"


def test_a_header_cut_anywhere_is_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    begin = min(tensor.offset for tensor in read_header(file).tensors.values())
    for number, length in enumerate([0, 2, 4, 10, 20, 50, 200, begin // 2, begin - 60]):
        short = tmp_path / f"{number}.gguf"
        short.write_bytes(whole[:length])
        assert refused(short)


def test_a_foreign_file_and_a_foreign_version_are_refused(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    assert refused(other)
    other.write_bytes(b"GGUF" + struct.pack(">I", 3) + file.read_bytes()[8:])
    assert refused(other)
    other.write_bytes(b"GGUF" + struct.pack("<I", 1) + file.read_bytes()[8:])
    assert refused(other)


def test_a_length_beyond_the_file_is_refused_before_it_is_read(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(file.read_bytes()[:16] + struct.pack("<Q", 1 << 60) + file.read_bytes()[24:])
    assert refused(other)
    other.write_bytes(file.read_bytes()[:24] + struct.pack("<Q", 1 << 60) + file.read_bytes()[32:])
    assert refused(other)


def field(kind: int, value: bytes) -> bytes:
    """A header of one field and no tensor."""
    name = struct.pack("<Q", 1) + b"a"
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + name + struct.pack("<I", kind) + value + bytes(64)


def test_an_array_longer_than_the_file_or_nested_without_end_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    for kind in (0, 6, 8, 12):  # bytes, numbers and strings
        other.write_bytes(field(9, struct.pack("<IQ", kind, 1 << 40)))
        assert refused(other)
    other.write_bytes(field(9, struct.pack("<IQ", 9, 1) * 3_000))
    assert refused(other)


def test_a_file_that_changes_is_read_again(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(file.read_bytes())
    read_header(other)
    other.write_bytes(file.read_bytes()[:100])
    assert refused(other)
