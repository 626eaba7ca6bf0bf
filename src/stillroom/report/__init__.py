"""The report of a run: one HTML file with words, tables and figures, readable offline."""

from __future__ import annotations

from pathlib import Path

from stillroom.errors import CannotSave
from stillroom.report.page import render
from stillroom.report.record import RunRecord

__all__ = ["RunRecord", "render", "write_report"]


def write_report(run_dir: Path | str) -> Path:
    """Write `report.html` into a run's folder and return its path.

    The page says what the folder lacks (a crashed run has no summary) and shows the rest.
    """
    path = Path(run_dir) / "report.html"
    temporary = path.with_name(path.name + ".tmp")
    page = render(RunRecord.load(Path(run_dir)))
    try:
        temporary.write_text(page, encoding="utf-8", newline="\n")
        temporary.replace(path)
    except OSError as error:
        raise CannotSave(
            f"the report cannot be written: {error.strerror or error}",
            where=str(path),
            advice=("free space on the disk, then: stillroom report RUN",),
        ) from error
    return path
