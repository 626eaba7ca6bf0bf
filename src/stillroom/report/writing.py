"""Write a page so that a reader sees the old one or the new one, never a part."""

from __future__ import annotations

from pathlib import Path

from stillroom.errors import CannotSave
from stillroom.files import reason_of, write_atomically

PAGE = "report.html"


def save(path: Path, contents: str | bytes) -> Path:
    try:
        write_atomically(path, contents.encode("utf-8") if isinstance(contents, str) else contents)
    except OSError as error:
        raise CannotSave(
            f"the report cannot be written: {reason_of(error)}",
            where=str(path),
            advice=("free space on the disk, then: stillroom report RUN",),
        ) from error
    return path
