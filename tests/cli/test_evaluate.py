"""Laws of `stillroom eval` as a command: what a run brings by itself, what is kept, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import output, run

from stillroom.config import load_config
from stillroom.engine.distill import distill

QUICK = ("--max-batches", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with held-out data of its own."""
    place = tmp_path_factory.mktemp("runs")
    held_out = str(tiny.save_text(place / "held_out.jsonl", count=20, seed=9))
    settings = tiny.settings(world, train__max_steps=3, data__eval=held_out, eval__samples=0)
    return distill(load_config(overrides=settings), place / "run", device="cpu").folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_a_run_alone_is_measured_beside_its_teacher_and_kept(folder: Path, capsys: Any) -> None:
    found = json.loads(output(capsys, "eval", str(folder), *QUICK, "--json"))
    assert found["data"].endswith("held_out.jsonl") and found["teacher"]["perplexity"] > 1
    kept = json.loads((folder / "eval.json").read_text())
    assert found["kept"] == str(folder / "eval.json") and kept["student"] == found["student"]
    assert kept["settings"]["max_length"] == 32, "the run's own length"
    page = Path(output(capsys, "report", str(folder)).strip()).read_text(encoding="utf-8")
    assert 'id="evaluated"' in page and "has changed since" not in page
    output(capsys, "export", str(folder), "--out", str(folder.parent / "out"))
    card = (folder.parent / "out" / "README.md").read_text()
    assert "## Measured by stillroom eval" in card and "`held_out.jsonl`" in card and str(folder) not in card


def test_the_student_s_own_folder_means_the_run_too(folder: Path, world: Path, capsys: Any) -> None:
    words = ["eval", "--model", str(folder / "student"), "--data", str(world / "train.jsonl"), *QUICK]
    assert f"kept  {folder.resolve() / 'eval.json'}" in output(capsys, *words)
    assert "teacher" not in json.loads((folder / "eval.json").read_text())


def test_figures_of_a_student_that_changed_are_not_passed_on(folder: Path, capsys: Any) -> None:
    output(capsys, "eval", str(folder), *QUICK)
    tiny.save_model(folder / "student", "llama", width=32, num_layers=1, seed=5)
    page = Path(output(capsys, "report", str(folder)).strip()).read_text(encoding="utf-8")
    assert "The student has changed since it was measured" in page
    text = output(capsys, "export", str(folder), "--out", str(folder.parent / "out"))
    assert "note    the card is without the figures of `stillroom eval`" in text
    assert "Not shown: the figures" in (folder.parent / "out" / "README.md").read_text()


def test_nothing_is_kept_where_it_is_not_wanted_or_not_of_a_run(folder: Path, world: Path, capsys: Any) -> None:
    assert "kept  " not in output(capsys, "eval", str(folder), *QUICK, "--no-keep")
    words = ["eval", "--model", str(world / "student"), "--data", str(world / "train.jsonl"), *QUICK]
    assert "kept" not in json.loads(output(capsys, *words, "--json"))
    assert not (folder / "eval.json").exists() and not (world / "eval.json").exists()


def test_a_folder_that_cannot_be_written_costs_a_note_and_not_the_figures(
    folder: Path, capsys: Any, monkeypatch: Any
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("stillroom.telemetry.evaluation_record.write_atomically", full)
    code, out, err = run(capsys, "eval", str(folder), *QUICK)
    assert code == 0 and "perplexity" in out and "not kept" in err and "No space left" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "which model to measure is not said"),
        (["RUN", "--model", "builtin:teacher"], "two names for one thing"),
        (["--model", "builtin:teacher"], "the text to measure on is not said"),
        (["RUN/none"], "holds no run"),
        (["RUN", "--bos", "perhaps"], "--bos perhaps"),
        (["RUN", "--max-length", "3"], "--max-length"),
        (["RUN", "--questions", "none.jsonl"], "cannot be read"),
        (["RUN", "--data", "none.jsonl"], "none.jsonl"),
    ],
)
def test_what_cannot_be_measured_is_refused(trained: Path, capsys: Any, words: list[str], told: str) -> None:
    code, _out, err = run(capsys, "eval", *(word.replace("RUN", str(trained)) for word in words))
    assert code == 2 and told in " ".join(err.split())


def test_a_run_that_held_out_a_share_asks_for_a_text(world: Path, tmp_path: Path, capsys: Any) -> None:
    settings = tiny.settings(world, train__max_steps=1, eval__samples=0)
    made = distill(load_config(overrides=settings), tmp_path / "run", device="cpu").folder
    code, _out, err = run(capsys, "eval", str(made))
    assert code == 2 and "held out a share" in " ".join(err.split()) and "--data FILE" in err


def test_a_model_that_is_not_there_is_refused(world: Path, tmp_path: Path, capsys: Any) -> None:
    code, _out, err = run(capsys, "eval", "--model", str(tmp_path / "none"), "--data", str(world / "train.jsonl"))
    assert code == 20 and "no model folder" in err
