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
from stillroom.data import fixed_batches, open_data
from stillroom.models import load_tokenizer
from stillroom.training.distill import distill
from stillroom.training.evaluate import evaluate

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
    assert "note    the model card is without the figures of `stillroom eval`" in text
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

    monkeypatch.setattr("stillroom.telemetry.record.write_atomically", full)
    code, out, err = run(capsys, "eval", str(folder), *QUICK)
    assert code == 0 and "perplexity" in out and "not kept" in err and "No space left" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "the model to evaluate is missing"),
        (["RUN", "--model", "builtin:teacher"], "RUN and --model are both given"),
        (["--model", "builtin:teacher"], "the text to score is missing"),
        (["RUN/none"], "not a Stillroom run folder"),
        (["RUN", "--bos", "perhaps"], "--bos perhaps"),
        (["RUN", "--max-length", "3"], "--max-length"),
        (["RUN", "--questions", "none.jsonl"], "cannot be read"),
        (["RUN", "--data", "none.jsonl"], "none.jsonl"),
    ],
)
def test_what_cannot_be_measured_is_refused(trained: Path, capsys: Any, words: list[str], told: str) -> None:
    code, _out, err = run(capsys, "eval", *(word.replace("RUN", str(trained)) for word in words))
    assert code == 2 and told in " ".join(err.split())


def _sources(place: Path) -> list[dict[str, Any]]:
    """A source with columns of its own beside a plain one."""
    rows = [json.dumps({"q": f"{number}?", "a": line}) for number, line in enumerate(tiny.sentences(60, 5))]
    (place / "asked.jsonl").write_text("\n".join(rows), encoding="utf-8")
    tiny.save_text(place / "plain.jsonl", count=80, seed=4)
    asked = {"path": str(place / "asked.jsonl"), "columns": {"prompt": "q", "completion": "a"}}
    return [asked, {"path": str(place / "plain.jsonl"), "weight": 0.5}]


@pytest.mark.parametrize("is_mixed", [False, True], ids=["one source", "two sources"])
def test_a_run_is_measured_on_exactly_what_it_held_out(
    world: Path, tmp_path: Path, capsys: Any, monkeypatch: Any, *, is_mixed: bool
) -> None:
    settings = tiny.settings(world, train__max_steps=2, eval__samples=0, eval__max_batches=0)
    settings |= {"data.train": _sources(tmp_path)} if is_mixed else {}
    config = load_config(overrides=settings)
    made = distill(config, tmp_path / "run", device="cpu")
    scored: list[list[str]] = []
    rows = open_data(config.data, load_tokenizer(config.student, config.student.model)).evaluation
    expected = [name for batch in fixed_batches(rows, 8) for name in batch.documents]

    def seen(student: Any, batches: Any, **options: Any) -> Any:
        scored.append([name for batch in batches for name in batch.documents])
        return evaluate(student, batches, **options)

    monkeypatch.setattr("stillroom.metrics.evaluate.evaluate", seen)
    found = json.loads(output(capsys, "eval", str(made.folder), "--device", "cpu", "--json"))
    assert scored == [expected, expected], "student and teacher, each on the run's documents"
    for role in ("student", "teacher"):
        row = made.summary[role]
        for name in ("perplexity", "bits_per_byte", "kl", "agreement", "calibration_error"):
            assert found[role][name] == pytest.approx(row[name], rel=1e-5, abs=1e-7), (role, name)
        assert found[role]["documents"] == row["documents"] == len(set(expected))
    output(capsys, "export", str(made.folder), "--out", str(tmp_path / "out"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "On the held-out share of `" in card and str(tmp_path) not in card


def test_a_run_whose_data_changed_is_not_measured_on_it(world: Path, tmp_path: Path, capsys: Any) -> None:
    text = tiny.save_text(tmp_path / "text.jsonl", count=80, seed=4)
    settings = tiny.settings(world, train__max_steps=1, eval__samples=0, data__train=str(text))
    made = distill(load_config(overrides=settings), tmp_path / "run", device="cpu").folder
    tiny.save_text(text, count=40, seed=6)
    code, _out, _err = run(capsys, "eval", str(made), *QUICK)
    assert code == 2
    text.unlink()
    code, _out, _err = run(capsys, "eval", str(made), *QUICK)
    assert code == 2


def test_a_model_that_is_not_there_is_refused(world: Path, tmp_path: Path, capsys: Any) -> None:
    code, _out, err = run(capsys, "eval", "--model", str(tmp_path / "none"), "--data", str(world / "train.jsonl"))
    assert code == 20 and "no model folder" in err
