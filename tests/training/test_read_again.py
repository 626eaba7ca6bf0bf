"""The student of a finished run is read again; a folder that is another model ends the run with its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from transformers import LlamaForCausalLM

from stillroom.cli import main
from stillroom.config import load_config
from stillroom.core.errors import CannotSave, StudentDiffers
from stillroom.telemetry import read_events
from stillroom.training import finish, loop
from stillroom.training.distill import distill, resume

SHORT = {"train__max_steps": 2, "train__eval_steps": 2, "eval__samples": 0}


def notes(folder: Path) -> list[str]:
    return [event["text"] for event in read_events(folder / "events.jsonl") if event["event"] == "note"]


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose weights are not all written as they are."""
    right = LlamaForCausalLM.save_pretrained

    def wrong(self: Any, folder: Path, **options: Any) -> None:
        weight = self.model.layers[0].mlp.up_proj.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(-1.0)
            right(self, folder, **options)
            weight.copy_(kept)

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", wrong)


@pytest.mark.parametrize("mode", ["fp32", "fp16-mixed", "fp16-split"])
def test_a_written_student_is_the_trained_one_and_the_log_says_so(world: Path, tmp_path: Path, mode: str) -> None:
    config = load_config(overrides=tiny.settings(world, **SHORT, precision__mode=mode))
    summary = distill(config, tmp_path / "run", device="cpu").summary
    assert summary["read_back"]["is_equal"] and summary["read_back"]["difference"] < 1e-4
    assert any("student/ was read back: logits on 2 rows differ by" in note for note in notes(tmp_path / "run"))


def test_memory_of_the_training_is_returned_before_a_second_student_is_read(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy stood next to what the steps had left behind: a tenth was added to the peak of a real model's run."""
    order: list[str] = []
    for name in ("save_student", "return_unused_memory", "read_again"):
        monkeypatch.setattr(finish, name, noted(order, name, getattr(finish, name)))
    distill(load_config(overrides=tiny.settings(world, **SHORT)), tmp_path / "run", device="cpu")
    assert order == ["save_student", "return_unused_memory", "read_again"]


def test_freed_memory_is_returned_after_every_evaluation_and_save(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(loop, "trim_heap", noted(order, "trim_heap", loop.trim_heap))
    settings = tiny.settings(world, train__max_steps=6, train__eval_steps=2, train__save_steps=3, eval__samples=0)
    distill(load_config(overrides=settings), tmp_path / "run", device="cpu")
    assert len(order) == 4, "at steps 2, 3, 4 and 6"


def noted(order: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        order.append(name)
        return function(*given)

    return call


@pytest.mark.usefixtures("forgetful")
def test_a_student_that_is_written_as_another_model_is_named_and_nothing_is_lost(world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with refused(StudentDiffers, "run") as caught:
        distill(load_config(overrides=tiny.settings(world, **SHORT)), folder, device="cpu")
    assert caught.value.exit_code == 24 and caught.value.advice and isinstance(caught.value, CannotSave)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "done" and not summary["read_back"]["is_equal"]
    assert (folder / "student" / "model.safetensors").exists() and list((folder / "checkpoints").glob("step-*"))
    ends = [event for event in read_events(folder / "events.jsonl") if event["event"] == "run_end"]
    assert [(end["status"], end["exit_code"]) for end in ends] == [("done", 24)]
    before = (folder / "events.jsonl").read_bytes()
    with pytest.raises(StudentDiffers):
        resume(folder, device="cpu")
    assert (folder / "events.jsonl").read_bytes() == before, "nothing was trained again"


@pytest.mark.usefixtures("forgetful")
def test_the_command_line_ends_with_24_and_writes_the_report(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["distill", "--out", str(tmp_path / "run"), "--device", "cpu", "--no-progress"]
    for key, value in tiny.settings(world, **SHORT).items():
        words += ["--set", f"{key}={value}"]
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 24 and "the student does not read back" in capsys.readouterr().err
    assert (tmp_path / "run" / "report.html").exists()
