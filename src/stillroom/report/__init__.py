"""The report of a run: one HTML file with words, tables and figures, readable offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stillroom.report.history import History, RunRecord
from stillroom.report.live import LiveReport
from stillroom.report.page import PAGE, render, render_several, save

__all__ = ["History", "LiveReport", "RunRecord", "render", "render_several", "write_report", "write_reports"]


def write_report(run_dir: Path | str, foot: str = "") -> Path:
    """Write `report.html` into a run's folder; return its path.

    The page says what the folder lacks (a crashed run has no summary) and shows the rest.
    """
    folder = Path(run_dir)
    return save(folder / PAGE, render(RunRecord.load(folder), foot))


def write_reports(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write one page about one run or several to a file; return its path."""
    runs = [RunRecord.load(folder) for folder in run_dirs]
    return save(out, render(runs[0]) if len(runs) == 1 else render_several(runs))
