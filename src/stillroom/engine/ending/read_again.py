"""Read the written student again at the end of a run. Checkpoints are not read: they have checksums of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stillroom.engine.run import Run
from stillroom.errors import StudentDiffers
from stillroom.models.load.read_back import ReadBack, read_back

SUMMARY = "read_back"  # the entry in a run's summary
_ROWS, _LENGTH = 2, 32  # of training text: wrong weights show at once, and a large student answers on a CPU


def read_again(run: Run) -> dict[str, Any]:
    """Compare student/ with the trained student; a note says by how much they differ. The entry for the summary.

    A merged adapter was compared when it was written. Of a sharded student this process has a part only.
    """
    if run.adapter is not None:
        return {}
    if run.parallel.is_sharded:
        run.log.write("note", text="student/ was joined from shards and not compared with the student in memory")
        return {}
    ids = run.canary().input_ids[:_ROWS, :_LENGTH].cpu()
    is_cut = run.config.student.init == "shrink"
    code = run.config.teacher if is_cut else run.config.student
    found = read_back(run.student.model, run.folder / "student", ids, code=code)
    run.log.write("note", text=_sentence(found, len(ids)))
    return {SUMMARY: found.to_dict()}


def _sentence(found: ReadBack, num_rows: int) -> str:
    if not found.is_equal:
        return f"student/ is written, and read back it is not the trained student: {found.reason}"
    if found.compared == "tensors":
        return "student/ was read back tensor by tensor, for want of memory for a copy: all are equal"
    return f"student/ was read back: logits on {num_rows} rows differ by {found.difference:.1e} at most"


def refuse_changed(folder: Path, summary: Mapping[str, Any]) -> None:
    """Raise if the summary says that the written student is another model. The run is complete, nothing is lost."""
    found = summary.get(SUMMARY) or {}
    if found.get("is_equal", True):
        return
    raise StudentDiffers(
        f"the student was written, and read back it is not the trained one: {found.get('reason')}",
        folder=folder,
        summary=summary,
        advice=[
            "the trained weights are in the run's checkpoints: student/ is another model, compare it before you use it",
            "another version of transformers may write this family rightly: pip install -U transformers",
            "use a student of another family",
        ],
    )
