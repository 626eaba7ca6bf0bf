"""A block becomes a row of the page of measured GPUs, once, and only if it is whole."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from stillroom.bench.run import block

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
bench_row: Any = importlib.import_module("bench_row")

RESULT = {
    "facts": {"device": "Tesla T4 | <b>", "kind": "cuda", "kernel": "triton", "versions": {"torch": "2.13.0+cu130"},
              "selftest_failed": []},
    "constants": {"rates": {"half": 24e12, "fp32": 7e12, "bandwidth": 256e9, "launch": 2e-6, "host": 6e-6}},
    "step": {"rows": [{"name": "triton rows, eager bodies", "seconds": {"all": 0.1, "head": 0.02}},
                      {"name": "triton rows, compiled bodies", "error": "it does not compile"}]},
    "verdict": {"judged": [{"name": f"a{i}", "at_published": 2.0 + i, "at_measured": 1.0 + i / 10} for i in range(3)],
                "x_bound": {"triton rows, eager bodies": 1.5}},
}  # fmt: skip


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gpus.md"
    path.write_text(bench_row.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(bench_row, "PAGE", path)
    return path


def test_a_block_becomes_one_row(page: Path, tmp_path: Path) -> None:
    pasted = tmp_path / "block.txt"
    pasted.write_text(f"```\n{block(RESULT)}\n```\n", encoding="utf-8")
    before = page.read_text(encoding="utf-8")
    assert bench_row.main([str(pasted), "--check"]) == 0 and page.read_text(encoding="utf-8") == before
    for _ in range(2):
        assert bench_row.main([str(pasted)]) == 0
    (added,) = page.read_text(encoding="utf-8").splitlines()[len(before.splitlines()) :]
    cells = [cell.strip() for cell in added.strip("|").split("|")]
    header = next(line for line in before.splitlines() if line.startswith("| GPU"))
    assert len(cells) == header.count("|") - 1
    assert cells[:3] == ["Tesla T4  b", "2.13.0+cu130", "triton"] and cells[3:5] == ["24", "256"]
    assert cells[5:] == ["100 (triton rows, eager bodies)", "1.5", "3", "1.1", "passed"]


def test_a_block_that_was_changed_adds_nothing(page: Path, tmp_path: Path) -> None:
    before = page.read_text(encoding="utf-8")
    pasted = tmp_path / "block.txt"
    pasted.write_text(block(RESULT).replace("24000", "65000"), encoding="utf-8")
    assert bench_row.main([str(pasted)]) == 2
    assert page.read_text(encoding="utf-8") == before
