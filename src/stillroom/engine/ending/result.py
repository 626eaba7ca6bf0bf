"""The result of a finished run, for the program that started it."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from stillroom.telemetry.record import section, show
from stillroom.telemetry.results import RESULT_COLUMNS, RESULT_ROWS
from stillroom.telemetry.wording import clean, format_result


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run: its folder and its summary.

    With several processes the first has the full summary; the others have only status, reason and advice.
    """

    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)
    already_finished: bool = False  # before this call, which trained nothing

    @property
    def student_path(self) -> Path:
        """The folder of the best student, for `AutoModelForCausalLM.from_pretrained`."""
        return self.folder / "student"

    @property
    def report_path(self) -> Path:
        return self.folder / "report.html"

    def load_student(self) -> tuple[Any, Any]:
        """(model, tokenizer) of the best student: FP32, on the CPU, in evaluation mode."""
        from stillroom.models.load.given import reload

        return reload(self.student_path)

    def __repr__(self) -> str:
        parts = [f"folder={str(self.folder)!r}", f"status={self.summary.get('status')!r}"]
        if "steps" in self.summary:
            parts.append(f"steps={self.summary['steps']}")
        row = section(self.summary, "student")
        if row:
            parts.append(f"perplexity={show(row, 'perplexity', format_result)}")
            others = [
                f"{word} {show(section(self.summary, key), 'perplexity', format_result)}"
                for key, word in (("student_before", "before"), ("teacher", "teacher"))
                if section(self.summary, key)
            ]
            parts[-1] += f" ({', '.join(others)})" if others else ""
        return f"Result({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """The result as a small table, for a notebook. Everything that comes from the run is escaped."""
        rows = [(label, section(self.summary, key)) for key, label in RESULT_ROWS if section(self.summary, key)]
        head = "".join(f"<th>{_cell(label)}</th>" for _, label, _ in RESULT_COLUMNS)
        body = "".join(
            f"<tr><th>{_cell(label)}</th>"
            + "".join(f"<td>{_cell(show(row, key, form))}</td>" for key, _, form in RESULT_COLUMNS)
            + "</tr>"
            for label, row in rows
        )
        table = f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
        status = _cell(self.summary.get("status", "unknown"))
        where = f"<code>{_cell(self.folder)}</code>"
        return f"<div><p>{status}: {where}{self._link()}</p>{table}</div>"

    def _link(self) -> str:
        """A link to the report, which a notebook can follow only below the directory it runs in."""
        path = self.report_path.absolute()
        if not path.exists() or not path.is_relative_to(Path.cwd()):
            return ""
        return f' <a href="{quote(path.relative_to(Path.cwd()).as_posix())}" target="_blank">report</a>'


def _cell(value: object) -> str:
    return html.escape(clean(str(value)), quote=True)
