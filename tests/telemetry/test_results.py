"""Laws of the rows of figures: both models side by side, benchmarks and questions included, and what is retained."""

from __future__ import annotations

from typing import Any

from synthetic import evaluated

from stillroom.telemetry.results import FigureRow, Side, assessment_lines, figure_rows


def rows(**over: Any) -> dict[str, FigureRow]:
    return {row.label: row for row in figure_rows({**evaluated(), **over})}


def test_every_figure_stands_in_a_row_with_what_is_retained() -> None:
    found = rows()
    first = found["perplexity"]
    assert (first.teacher.value, first.student.value, first.retained) == ("20.3", "57.1", "35.6%")
    assert first.student.interval == "54.2 to 60.3" and found["parameters"].retained == "0.125x"
    assert found["exact match"].student == Side("31.0%", "23.0% to 40.0%")


def test_figures_of_benchmarks_are_retained_by_whether_higher_is_better() -> None:
    found = rows()
    accuracy, words, samples = (found[f"arc_easy {name}"] for name in ("acc", "word_perplexity", "samples"))
    assert accuracy.student == Side("0.310", "0.287 to 0.334") and accuracy.retained == "70.5%"
    assert words.retained == "50.0%", "lower is better: the teacher's over the student's"
    assert samples.student.value == "2,376" and samples.retained == ""


def test_records_of_another_shape_give_no_rows() -> None:
    for record in ({}, {"student": {"tasks": {"a": 3}}}, {"student": {"tasks": []}, "retained": 1}):
        assert figure_rows(record) == []


def test_a_command_prints_the_same_rows() -> None:
    lines = assessment_lines(evaluated())
    for row in figure_rows(evaluated()):
        (line,) = [line for line in lines if line.startswith(f"{row.label}  ")]
        assert line.split()[-1] == row.retained or not row.retained
        assert row.student.value in line and row.teacher.value in line


def test_long_and_hostile_names_of_benchmarks_stay_in_their_line() -> None:
    name = "x" * 200 + "\x1b[2J\n"
    record = {"student": {"perplexity": 3.0, "tasks": {name: {name: 0.5}}}}
    lines = assessment_lines(record)
    assert all("\x1b" not in line and "\n" not in line and len(line) < 100 for line in lines)
