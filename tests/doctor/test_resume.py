"""`verify-resume` proves the law where it holds, and names the first tensor where it does not."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import commands
import process_jobs
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from stillroom.config import Config, load_config
from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.doctor.resume import Difference, Proof, gap, refusals, shortened, verify_resume


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs are forks of this process: each is one of its own, and none imports torch again.

    The run that fails is started as the command starts it, in a new interpreter.
    """

    def run_apart(words: list[str], device: str) -> subprocess.CompletedProcess[str]:
        ended = process_jobs.command([*words, "--device", device, "--no-progress", "--json"]).wait()
        return subprocess.CompletedProcess(words, ended.code, ended.out, ended.err)

    monkeypatch.setattr("stillroom.doctor.resume.run_apart", run_apart)


def config(world: Path, **over: Any) -> Config:
    return load_config(overrides=tiny.settings(world, **over))


def written(world: Path, folder: Path, **over: Any) -> Path:
    path = folder / "run.json"
    path.write_text(json.dumps(config(world, **over).to_dict()))
    return path


@pytest.mark.usefixtures("forked")
def test_a_configuration_that_resumes_is_proven_and_leaves_nothing(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradient accumulation, FP16 with residuals, a projector and its moments: all of it is state."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    over = {"precision__mode": "fp16-split", "train__gradient_accumulation_steps": 2,
            "objectives__feature__weight": 0.1, "train__max_steps": 5000}  # fmt: skip
    path = written(world, tmp_path, **over)
    code, out, err = commands.run(capsys, "verify-resume", str(path), "--steps", "5", "--device", "cpu")
    assert code == 0, err
    assert "same    every bit" in out and "killed before step 4 and resumed from step 2" in " ".join(out.split())
    assert "refused a run with other data, other teacher, other student" in out
    assert "fp16-split" in out and max(map(len, out.splitlines())) <= 80
    assert {entry.name for entry in tmp_path.iterdir()} == {"run.json", "tmp"} and not any((tmp_path / "tmp").iterdir())


def spoil(folder: Path, group: str, name: str) -> None:
    """Change one bit in the middle of a mantissa in the newest checkpoint, and make its manifest agree."""
    checkpoint = max((folder / "checkpoints").iterdir())
    path = checkpoint / f"{group}.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1).view(torch.int32)[0] ^= 1 << 16
    save_file(tensors, path)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.usefixtures("forked")
def test_the_first_tensor_that_differs_is_named(world: Path) -> None:
    """One bit of one moment, of the smallest weight: no loss shows it, the tensor does."""
    spoiled = "model.norm.weight.second"
    proof = verify_resume(
        config(world), num_steps=3, device="cpu", after_kill=lambda folder: spoil(folder, "optimizer", spoiled)
    )
    assert not proof.holds and proof.first_tensor is not None
    assert "model.norm.weight" in proof.first_tensor.name
    assert "values, the first at" in proof.first_tensor.what
    assert proof.to_dict()["first_tensor"]["name"] == proof.first_tensor.name


def test_a_difference_ends_the_command_with_its_code_and_the_tensor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Difference("step", "step 3", "train_loss 1.0 and 1.1")]
    found += [Difference("tensor", f"student/model.layers.{layer}.weight", "1 of 9 values") for layer in range(7)]
    proof = Proof(4, 3, 2, "fp32", 12, 4096, 1.0, tuple(found))
    monkeypatch.setattr("stillroom.doctor.resume.verify_resume", lambda *_given, **_named: proof)
    code, out, err = commands.run(capsys, "verify-resume", "--steps", "4")
    assert code == 25
    assert "step 3" in out and "student/model.layers.0.weight" in " ".join(err.split())
    code, out, _err = commands.run(capsys, "verify-resume", "--steps", "4", "--json")
    assert code == 25 and json.loads(out)["first_tensor"]["name"] == "student/model.layers.0.weight"


def test_an_input_that_is_not_looked_at_is_named(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compared, and the run goes on with anything."""
    from stillroom.training import distill as engine

    monkeypatch.setattr(engine.InputCheck, "_compare", lambda *_given: None)
    short = config(world, train__max_steps=2, eval__samples=0)
    engine.distill(short, tmp_path / "run", device="cpu")
    tried = dict(refusals(tmp_path / "run", short, tmp_path, "cpu"))
    assert list(tried) == ["data", "teacher", "student"]
    assert all(wrong is not None and wrong.kind == "input" for wrong in tried.values())


def test_a_run_that_fails_says_why_with_its_own_code(world: Path) -> None:
    with pytest.raises(BrokenAtStart):
        verify_resume(config(world, teacher__model="./nosuch"), num_steps=3, device="cpu")


def test_a_kill_outside_of_the_run_is_refused(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        shortened(config(world), 8, 9)
    assert caught.value.where == "--steps, --kill-at"
    code, _out, err = commands.run(capsys, "verify-resume", "--steps", "8", "--kill-at", "1")
    assert code == 2 and "--kill-at 6" in err


def test_a_short_run_keeps_everything_but_its_length(world: Path) -> None:
    given = config(world, train__max_steps=9000, train__warmup_steps=800, train__early_stopping=3, eval__max_batches=0)
    short = shortened(given, 8, 5)
    assert (short.train.max_steps, short.train.save_steps, short.train.warmup_steps) == (8, 3, 7)
    assert short.train.early_stopping == 0 and short.eval.max_batches == 2
    assert short.objectives == given.objectives and short.data == given.data and short.precision == given.precision


def test_bits_are_compared_and_not_numbers() -> None:
    zeros = torch.tensor([0.0, float("nan")])
    assert gap(zeros, zeros.clone()) == ""
    assert "1 of 2 values, the first at 0: 0.0 uninterrupted, -0.0 resumed" in gap(
        zeros, torch.tensor([-0.0, float("nan")])
    )
    assert "float16" in gap(zeros, zeros.half())
