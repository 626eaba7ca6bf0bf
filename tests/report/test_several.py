"""Laws of the page about several runs."""

from __future__ import annotations

import json
from pathlib import Path

from synthetic import write_run

from stillroom.report import RunRecord, render_several
from stillroom.report.page import unique_names


def two(folder: Path) -> list[RunRecord]:
    a, b = write_run(folder / "a", num_steps=60), write_run(folder / "b", num_steps=60, until=40)
    config = json.loads((b / "config.json").read_text())
    config["train"]["learning_rate"] = 0.5
    (b / "config.json").write_text(json.dumps(config))
    return [RunRecord.load(a), RunRecord.load(b)]


def test_results_and_differing_settings_stand_side_by_side(tmp_path: Path) -> None:
    page = render_several(two(tmp_path))
    assert "Of 2 runs, stdlib-demo (1) has the lowest held-out perplexity: 57.1" in page
    assert ">train.learning_rate<" in page and ">0.5<" in page and ">0.001<" in page
    assert ">train.seed<" not in page, "a setting that is the same in all runs is not listed"
    assert ">unfinished<" in page and ">done<" in page


def test_what_a_run_lacks_is_said_with_its_name(tmp_path: Path) -> None:
    assert "stdlib-demo (2): summary.json is not there." in render_several(two(tmp_path))


def test_runs_of_one_name_are_told_apart() -> None:
    runs = [RunRecord("x"), RunRecord("y"), RunRecord("x")]
    assert unique_names(runs) == ["x (1)", "y", "x (3)"]


def test_runs_without_a_result_have_a_page() -> None:
    assert "none of which has a result" in render_several([RunRecord("a"), RunRecord("b")])
