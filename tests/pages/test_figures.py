"""Every marked figure of README and docs is what its result file gives, and some pages have no others."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
figures: Any = importlib.import_module("figures")

# Pages on which every figure is marked, and the numbers there that are no measurements.
WHOLE = {
    "README.md": {"3.11"},  # Python
    "docs/concepts/distillation.md": {
        "0.5",  # a temperature
        "0.3", "0.7",  # weights, held by tests/pages/test_readme.py
    },
    "docs/concepts/precision.md": {
        "65,504",  # the largest FP16 number
        "2.5", "50,000", "340",  # a clamp, a vocabulary, and what follows: 50,000 / exp(5) = 337
        "100",  # steps of the run whose weights were counted
    },
    "docs/results/claims.md": set(),
    "docs/results/scaling.md": {
        "1,024", "256",  # GPUs that are simulated
        "1", "2",  # per cent: what a test allows, an assumption
        "2.6", "2.13",  # versions of torch
    },
}  # fmt: skip
# Numbers with a decimal point, a comma between thousands, three digits and more, or a percent sign.
FIGURE = re.compile(r"(?<![\w.,-])-?(?:\d+\.\d+|\d{1,3}(?:,\d{3})+|\d{3,}|\d+(?= %))(?![\w.]*\w)")
TABLE = {"rows": {"a b": {"x": 2.016}}, "runs": [{"n": 1, "v": 10.0}, {"n": 2, "v": 20.0}], "ratio": 1.006}


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.name)
def test_every_marked_figure_of_a_page_holds(page: Path) -> None:
    assert figures.checked(page.read_text(encoding="utf-8"))[1] == []


@pytest.mark.parametrize("page", WHOLE)
def test_no_figure_of_a_page_is_without_a_source(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    allowed = {mark["text"] for mark in figures.MARKED.finditer(text)} | WHOLE[page]
    text = figures.without_marks(text)
    for pattern in (r"^```.*?^```", r"<!--.*?-->", r"`[^`\n]*`", r"\]\([^)]*\)"):
        text = re.sub(pattern, lambda found: " " * len(found[0]), text, flags=re.MULTILINE | re.DOTALL)
    numbers = FIGURE.findall(text)
    assert len(numbers) > 10
    assert set(numbers) <= allowed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ('rows["a b"].x', 2.016),
        ("runs[n=2].v", 20.0),
        ("runs[-1].v", 20.0),
        ("mean runs[*].v", 15.0),
        ("mean runs[*].v - min runs[*].v", 5.0),
        ("100 * ratio - 100", 0.6),
        ("count runs[*].v", 2.0),
        ("max runs[*].v / 4", 5.0),
    ],
)
def test_a_field_is_read_from_a_table(field: str, value: float) -> None:
    assert figures.evaluate(TABLE, field) == pytest.approx(value)


@pytest.mark.parametrize("field", ["rows.missing", "runs[*].v", "runs[n=3].v", "mean runs[n=3].v", "runs(0)"])
def test_a_field_that_is_not_one_value_is_an_error(field: str) -> None:
    with pytest.raises((KeyError, ValueError)):
        figures.evaluate(TABLE, field)


@pytest.mark.parametrize(
    ("figure", "value", "new"),
    [
        ("2.02", 2.0163, "2.02"),
        ("2.02", 2.0051, "2.01"),
        ("160,979", 160980.0, "160,980"),
        ("-0.009", -0.0086, "-0.009"),
        ("16", 16.6, "17"),
        ("1.2e-5", 0.000034, "3.4e-5"),
    ],
)
def test_a_value_is_written_as_the_figure_that_stood_there(figure: str, value: float, new: str) -> None:
    assert figures.agrees(figure, value) is (figure == new)
    assert figures.written_like(figure, value) == new
    assert figures.agrees(new, value)


PAGE = """It takes <!--f1-->2.0<!--/--> times as long.

<!-- figures
result.json
  f1 = x
-->
"""


def test_a_stale_figure_is_told_and_written(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    result.write_text('{"x": 2.04}', encoding="utf-8")
    assert figures.checked(PAGE, tmp_path) == (PAGE, [])
    assert figures.without_marks(PAGE).strip() == "It takes 2.0 times as long."
    result.write_text('{"x": 2.06}', encoding="utf-8")
    new, wrong = figures.checked(PAGE, tmp_path)
    assert len(wrong) == 1 and "<!--f1-->2.1<!--/-->" in new
    assert figures.checked(new, tmp_path) == (new, [])


@pytest.mark.parametrize(
    "page",
    [
        PAGE.replace("f1 = x", "f1 = y"),
        PAGE.replace("result.json", "other.json"),
        PAGE.replace("f1 = x", "f2 = x"),
        PAGE.replace("as long", "as <!--f1-->2.0<!--/--> long"),
        PAGE.replace("2.0<!--/-->", "2.0"),
    ],
    ids=["no such field", "no such file", "no source", "used twice", "not closed"],
)
def test_a_figure_without_a_source_is_told(tmp_path: Path, page: str) -> None:
    (tmp_path / "result.json").write_text('{"x": 2.04}', encoding="utf-8")
    new, wrong = figures.checked(page, tmp_path)
    assert new == page and wrong


def test_no_line_begins_with_a_mark() -> None:
    """A comment at the beginning of a line ends the paragraph before it on the site."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in figures.pages()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.match(r"\s*<!--f\d+-->", line)
    ]
    assert not found
