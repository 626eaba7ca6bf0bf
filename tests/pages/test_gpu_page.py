"""The page about cards is true: its bars are those of the committed model, and it says of each whether it is met."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
figures: Any = importlib.import_module("figures")
PAGE = figures.without_marks((ROOT / "docs" / "results" / "gpu.md").read_text(encoding="utf-8"))
RESULTS = ROOT / "benchmarks" / "gpu" / "results"


def test_the_bars_on_the_page_are_those_of_the_result_file() -> None:
    bars = json.loads((RESULTS / "cost_model.json").read_text(encoding="utf-8"))["bars"]
    for bar in bars:
        said = "met" if bar["value"] <= bar["bar"] else "missed"
        value = f"{bar['rates']} | {bar['value']:.2f} | {bar['bar']} | {said}"
        assert f"| {bar['problem']} | {bar['what']} | {value} |" in PAGE


def test_every_table_of_the_model_says_that_it_is_one() -> None:
    text = (RESULTS / "cost_model.md").read_text(encoding="utf-8")
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles
    assert all(title.startswith("## Model: ") for title in titles)


def test_the_grid_s_range_on_the_page_is_that_of_the_result_file() -> None:
    rows = json.loads((RESULTS / "memory_grid.json").read_text(encoding="utf-8"))["rows"]
    ratios = [row["recorded_over_planned"] for row in rows]
    assert f"all {len(rows)} lie between {min(ratios):.2f} and {max(ratios):.2f} of the plan" in PAGE
    assert all(abs(ratio - 1) <= 0.1 for ratio in ratios)
