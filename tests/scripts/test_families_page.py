"""The page of families: a sample of it is made again, and it leaves none out."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import families
import pytest
import transformers

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
families_page: Any = importlib.import_module("families_page")


def on_the_page() -> dict[str, list[str]]:
    """The cells of each family's row."""
    lines = families_page.PAGE.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[1:]}


@pytest.mark.parametrize("family", ["llama", "mamba", "bert"])
def test_a_family_does_what_the_page_says(family: str) -> None:
    found = families_page.try_family(family)
    assert found.outcome == ("refused" if family == "bert" else "works")
    network, outcome, head, _said = on_the_page()[family]
    assert (network, outcome, head) == (found.network, found.outcome, found.head)


def test_the_page_has_every_family_of_the_transformers_it_was_made_with() -> None:
    if f"transformers {transformers.__version__}," not in families_page.PAGE.read_text(encoding="utf-8"):
        pytest.skip("the page was made with another transformers")
    rows = on_the_page()
    assert set(rows) == set(families.ALL)
    assert not [family for family, row in rows.items() if row[1] == "fault"]
    assert all(row[3] for row in rows.values() if row[1] == "refused"), "each refusal has its sentence"


def test_a_fault_is_told_from_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("an error of ours")

    monkeypatch.setattr(families_page, "_tried", broken)
    assert families_page.try_family("llama").outcome == "fault"
    assert families_page.try_family("no such family").outcome == "not built"
