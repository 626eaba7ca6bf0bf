"""Every figure of README and of the pages listed here is one of a result file, as docs/claims.md says."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
module: Any = importlib.import_module("claims")
CLAIMS = module.claims()

# Pages on which no figure may stand without a claim.
WHOLE = ["README.md", "docs/explanation.md", "docs/scaling.md"]
# Numbers with a decimal point, a comma between thousands, three digits and more, or a percent sign.
FIGURE = re.compile(r"(?<![\w.,-])-?(?:\d+\.\d+|\d{1,3}(?:,\d{3})+|\d{3,}|\d+(?= %))(?![\w.]*\w)")


@pytest.mark.parametrize("page", sorted({claim.page for claim in CLAIMS}))
def test_every_claim_of_a_page_holds(page: str) -> None:
    bad = {claim.words: why for claim in CLAIMS if claim.page == page and (why := module.complaint(claim))}
    assert bad == {}


def figures(text: str) -> list[tuple[str, str]]:
    """(number, words around it) of what looks like a figure outside of code, links and comments."""
    for pattern in (r"^```.*?^```", r"<!--.*?-->", r"`[^`\n]*`", r"\]\([^)]*\)"):
        text = re.sub(pattern, lambda found: " " * len(found[0]), text, flags=re.MULTILINE | re.DOTALL)
    return [
        (one[0], " ".join(text[max(0, one.start() - 60) : one.end() + 60].split())) for one in FIGURE.finditer(text)
    ]


def exempt(page: str) -> list[str]:
    """Numbers that claims.md lists as no measurements of a page."""
    section = module.PAGE.read_text(encoding="utf-8").partition(f"## Numbers in `{page}` that are no measurements")[2]
    lines = section.partition("\n## ")[0].splitlines()
    return [number[0] for line in lines for number in FIGURE.finditer(line.partition(":")[0])]


@pytest.mark.parametrize("page", WHOLE)
def test_no_figure_of_a_page_is_without_a_claim(page: str) -> None:
    allowed = {claim.figure for claim in CLAIMS if claim.page == page} | set(exempt(page))
    found = figures((ROOT / page).read_text(encoding="utf-8"))
    assert len(found) > 15
    assert {number: around for number, around in found if number not in allowed} == {}


def test_a_claim_is_about_one_figure_once() -> None:
    keys = [(claim.page, claim.words) for claim in CLAIMS]
    assert len(keys) == len(set(keys)) > 100


TABLE = {"rows": {"a b": {"x": 2.016}}, "runs": [{"n": 1, "v": 10.0}, {"n": 2, "v": 20.0}], "ratio": 1.006}


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
    assert module.evaluate(TABLE, field) == pytest.approx(value)


@pytest.mark.parametrize("field", ["rows.missing", "runs[*].v", "runs[n=3].v", "mean runs[n=3].v", "runs(0)"])
def test_a_field_that_is_not_one_value_is_an_error(field: str) -> None:
    with pytest.raises((KeyError, ValueError)):
        module.evaluate(TABLE, field)


@pytest.mark.parametrize(
    ("figure", "value", "is_right"),
    [
        ("2.02", 2.0163, True),
        ("2.02", 2.0051, False),
        ("160,979", 160979.4, True),
        ("160,979", 160980.0, False),
        ("-0.009", -0.0086, True),
        ("16", 16.4, True),
        ("no number", 1.0, False),
    ],
)
def test_a_figure_is_the_value_rounded_as_it_is_written(figure: str, value: float, is_right: bool) -> None:
    assert module.agrees(figure, value) is is_right


def test_a_wrong_figure_missing_words_and_a_missing_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("It takes 2.0\ntimes as long.\n", encoding="utf-8")
    (tmp_path / "result.json").write_text('{"x": 2.04}', encoding="utf-8")
    (tmp_path / "script.py").touch()

    def complaint(words: str = "takes **2.0** times", file: str = "result.json", date: str = "2026-01-01") -> str:
        found: str = module.complaint(module.Claim("page.md", words, file, "x", "script.py run", date), tmp_path)
        return found

    assert complaint() == ""
    assert "not on the page" in complaint("takes **2.1** times")
    assert "does not exist" in complaint(file="other.json")
    assert "not a date" in complaint(date="yesterday")
    (tmp_path / "result.json").write_text('{"x": 2.06}', encoding="utf-8")
    assert "x is 2.06" in complaint()
