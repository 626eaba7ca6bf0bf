"""The page for someone with a card: its one command works without one, and says what came of each run."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
gpu_report: Any = importlib.import_module("gpu_report")


def test_a_report_is_made_where_there_is_no_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    words = ["--device", "cpu", "--modes", "fp16-master", "--steps", "3", "--json", str(out)]
    monkeypatch.setattr("sys.argv", [str(SCRIPTS / "gpu_report.py"), *words])
    gpu_report.main()  # each run is a process of its own
    printed = capsys.readouterr().out
    report = json.loads(out.read_text())
    reference, run = report["runs"]
    assert (reference["mode"], run["mode"]) == ("fp32", "fp16-master")
    for one in (reference, run):
        assert len(one["losses"]) == 3
        assert one["seconds_a_step"] > 0
        assert one["end"] == ""
        assert one["mode"] in one["precision"]
    difference = gpu_report.furthest(run["losses"], reference["losses"])
    assert difference is not None
    assert 0 < difference < 0.01, "half weights are near the reference and not it"
    assert "fp16-master" in printed
    assert report["machine"]["versions"]["torch"] in printed


def test_a_run_that_ends_badly_is_a_line_of_the_report() -> None:
    found = gpu_report.run_once("demo", "no such mode", "cpu", 1)
    assert "no such mode" in found.end
    assert "no such mode" in gpu_report.table([found], [])


def test_bf16_is_asked_of_cards_that_have_it() -> None:
    asked = ["fp32", "bf16-mixed"]
    assert gpu_report.modes_for({"cards": [{"native_bf16": False}]}, asked) == ["fp32"]
    assert gpu_report.modes_for({"cards": [{"native_bf16": True}]}, asked) == asked


@pytest.mark.parametrize(
    ("losses", "reference", "expected"), [([1.0, 2.2], [1.0, 2.0], 0.1), ([], [1.0], None), ([2.0], [2.0, 3.0], 0.0)]
)
def test_the_furthest_loss_is_a_share_of_the_reference(
    losses: list[float], reference: list[float], expected: float | None
) -> None:
    assert gpu_report.furthest(losses, reference) == (None if expected is None else pytest.approx(expected))
