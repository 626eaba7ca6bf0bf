"""Open a data file as bytes, decompressed where its name ends in .gz or .zst.

What a compressed file may expand to is bounded by its size: a few kilobytes can otherwise expand without end. zstd is
read by pyarrow, which `datasets` installs.
"""

from __future__ import annotations

import gzip
import io
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from stillroom.data.sources.needed import needed
from stillroom.errors import DataError

COMPRESSED = (".gz", ".zst")
MAX_EXPANSION = 250  # times its size; text compresses 3 to 20 times, text of copies some 100 times
FREE_BYTES = 64 << 20  # of every file, however small


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSED


def data_suffix(name: str | Path) -> str:
    """The suffix that names the format: ".jsonl" of both "a.jsonl" and "a.jsonl.gz"."""
    path = Path(name)
    return (Path(path.stem) if is_compressed(path) else path).suffix.lower()


def open_bytes(path: Path) -> IO[bytes]:
    """The content of a file, decompressed. Raise `DataError` where the compressed data is damaged or goes on and on."""
    if not is_compressed(path):
        return path.open("rb")
    source = gzip.open(path, "rb") if path.suffix.lower() == ".gz" else _open_zstd(path)  # noqa: SIM115 - closed by _Expanded
    return io.BufferedReader(_Expanded(path, source.read, source.close), 1 << 16)


def open_seekable(path: Path) -> IO[bytes]:
    """As `open_bytes`, for formats that are read from their end. A compressed file is expanded into a temporary one."""
    if not is_compressed(path):
        return path.open("rb")
    expanded: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it, which deletes it
    with open_bytes(path) as source:
        shutil.copyfileobj(source, expanded)
    expanded.seek(0)
    return expanded


def _open_zstd(path: Path) -> Any:
    arrow = needed("pyarrow", path.name)
    return arrow.CompressedInputStream(arrow.OSFile(str(path)), "zstd")


class _Expanded(io.RawIOBase):
    """The decompressed bytes of a file, counted."""

    def __init__(self, path: Path, read: Callable[[int], bytes], close: Callable[[], None]) -> None:
        self._path = path
        self._read = read
        self._close = close
        self._size = path.stat().st_size
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            piece = self._read(len(buffer))
        except (EOFError, OSError, zlib.error) as error:
            raise self._damaged(error) from error
        self._num_bytes += len(piece)
        bound = max(FREE_BYTES, MAX_EXPANSION * self._size)
        if self._num_bytes > bound:
            raise DataError(
                f"{self._path} has {self._size:,} bytes and expands to more than {bound:,}",
                advice=["look at what it holds", "if that is as it should be, decompress it and name the result"],
            )
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._close()
        super().close()

    def _damaged(self, error: Exception) -> DataError:
        is_cut_off = isinstance(error, EOFError) or "truncated" in str(error).lower()
        what = "is cut off" if is_cut_off else f"is damaged or no {self._path.suffix} file ({error})"
        return DataError(
            f"{self._path} {what}: {self._num_bytes:,} bytes of its content could be read",
            advice=["download or write it again"],
        )
