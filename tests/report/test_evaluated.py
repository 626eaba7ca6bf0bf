"""Laws of the page's part about `stillroom eval`: a table of both models, a warning for another student's figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from synthetic import evaluated

from stillroom.report import RunRecord, render
from stillroom.report.page import evaluated as evaluated_part
from stillroom.telemetry.record import Evaluated

HOSTILE = "</table><script>alert(1)</script>\x1b[31m\u202e"


def part(doubt: str = "", **over: Any) -> str:
    """The section of the page."""
    page = render(RunRecord("run", evaluated=Evaluated({**evaluated(), **over}, doubt)))
    begin = page.index('<section id="evaluated"')
    return page[begin : page.index("</section>", begin)]


def test_teacher_student_and_what_is_retained_stand_side_by_side() -> None:
    made = part()
    for words in ("retained", "57.1", "20.3", "35.6%", "exact match", "arc_easy acc", "held_out.jsonl", "2 cores"):
        assert words in made, words
    assert "<aside>" not in made


def test_figures_of_an_earlier_student_are_said_to_be_so() -> None:
    made = part("The student has changed since it was measured.")
    assert made.index("<aside>") < made.index("<table")
    assert "has changed since" in made


def test_without_a_teacher_there_is_one_column() -> None:
    made = part(teacher=None, retained=None)
    assert "retained</th>" not in made and 'data-label="teacher"' not in made


def test_without_a_record_there_is_no_part() -> None:
    run = RunRecord("run")
    assert evaluated_part(run) is None and 'id="evaluated"' not in render(run)
    assert 'id="evaluated"' in render(replace(run, evaluated=Evaluated(evaluated())))


def test_hostile_names_and_notes_are_inert() -> None:
    row = {"perplexity": 3.0, "tasks": {HOSTILE: {HOSTILE: 0.5}}, "notes": [HOSTILE] * 40}
    made = part(student=row, data=HOSTILE, device=HOSTILE, time=HOSTILE, settings={HOSTILE: HOSTILE})
    assert "<script>" not in made and "\x1b" not in made and "\u202e" not in made


def test_many_figures_and_notes_are_cut_and_counted() -> None:
    made = part(student={"tasks": {f"t{n}": {"acc": 0.5} for n in range(200)}, "notes": [str(n) for n in range(40)]})
    assert "more figures are in eval.json" in made and "more notes are in eval.json" in made
