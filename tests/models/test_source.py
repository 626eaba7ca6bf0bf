"""What a name means: a folder, a model of the hub, or a mistake that is answered at once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import damage
import pytest
import refusals
import torch
from damage import cut_short, rewrite, train
from safetensors.torch import load_file

from stillroom.cli import main
from stillroom.config.schema import StudentConfig, TeacherConfig
from stillroom.core.errors import BrokenAtStart
from stillroom.metrics.evaluate import assess
from stillroom.models import files, find, load_student, open_teacher

# -- names -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub out of reach. The list has the questions it was asked."""
    asked: list[str] = []

    def model_info(_self: Any, name: str, *, timeout: float, **_options: Any) -> Any:
        asked.append(name)
        assert timeout > 0, "a question without a limit may hang for good"
        raise ConnectionError("no route to host")

    monkeypatch.setattr("stillroom.models.files.HfApi.model_info", model_info)
    files._ask_hub.cache_clear()
    return asked


@pytest.mark.parametrize(
    "name",
    ["runs/x", "runs/x/student", "./x", "../x", "/nowhere/x", "~/nowhere", "runs/", "model/", "C:\\models\\x", "a\\b",
     "x.safetensors", "org/model.gguf", "runs/first/student"],
)  # fmt: skip
def test_a_name_of_a_path_is_never_asked_of_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: list[str], name: str
) -> None:
    (tmp_path / "runs" / "x1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BrokenAtStart) as caught:
        load_student(StudentConfig(model=name), seed=0)
    assert name in str(caught.value) and caught.value.advice and not no_hub


def test_a_misspelt_folder_is_answered_with_the_one_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "teacher").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with refusals.refused(BrokenAtStart, "", "runs/teacher"):
        find("runs/techer")


@pytest.mark.parametrize("name", ["gpt2", "some-org/some-model", "Org_1/model.v2-7b"])
def test_a_hub_that_cannot_be_reached_is_asked_once(no_hub: list[str], name: str) -> None:
    for _attempt in range(2):
        with refusals.refused(BrokenAtStart, "", "no route to host") as caught:
            load_student(StudentConfig(model=name), seed=0)
    files._ask_hub.cache_clear()
    assert no_hub == [name] and "network" in str(caught.value)


def test_a_model_of_the_hub_is_a_folder_like_any_other(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache links its files: a link out of the folder is no escape. Pickles are not asked for."""
    snapshot, asked = tmp_path / "snapshot", []
    snapshot.mkdir()
    for path in model_folder.iterdir():
        (snapshot / path.name).symlink_to(path)

    def snapshot_download(name: str, *, revision: str, allow_patterns: list[str], **_options: Any) -> str:
        asked.extend(allow_patterns)
        assert revision == "c0ffee", "all files are of the commit that was asked for"
        return str(snapshot)

    hub = SimpleNamespace(model_info=lambda _name, **_options: SimpleNamespace(sha="c0ffee"))
    monkeypatch.setattr("stillroom.models.files.snapshot_download", snapshot_download)
    monkeypatch.setattr("stillroom.models.files.HfApi", lambda: hub)
    files._ask_hub.cache_clear()
    found = open_teacher(TeacherConfig(model="org/name"), torch.float32)
    assert found.is_described and "model.safetensors" in asked
    assert not any("bin" in pattern or "py" in pattern for pattern in asked)
    files._ask_hub.cache_clear()


def test_a_model_in_the_hub_s_cache_is_found_without_a_network(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache as the hub's own library lays it out: a ref, a snapshot of links, and the files they lead to."""
    home, commit = tmp_path / "hub" / "models--org--name", "0123456789" * 4
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (home / part).mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    for number, path in enumerate(model_folder.iterdir()):
        shutil.copy(path, home / "blobs" / f"{number:040d}")
        (home / "snapshots" / commit / path.name).symlink_to(home / "blobs" / f"{number:040d}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    found = open_teacher(TeacherConfig(model="org/name"), torch.float32)
    assert torch.equal(found.head.weight, load_file(model_folder / "model.safetensors")["lm_head.weight"])
    assert "hub's cache" in " ".join(found.notes)
    with refusals.refused(BrokenAtStart, "", "org/other"):
        open_teacher(TeacherConfig(model="org/other"), torch.float32)


def test_a_file_is_not_a_folder(model_folder: Path) -> None:
    assert damage.refused(model_folder / "model.safetensors", "is a file")


def test_the_folder_of_a_run_points_to_its_student(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"config": {}}')
    (tmp_path / "events.jsonl").write_text("")
    assert damage.refused(tmp_path, "folder of a run", str(tmp_path / "student"), how=lambda path: train(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="everything may be read")
@pytest.mark.parametrize("part", ["", "config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_without_permission(model_folder: Path, part: str) -> None:
    (model_folder / part).chmod(0)
    try:
        assert damage.refused(model_folder, "Permission denied")
    finally:
        (model_folder / part).chmod(0o700)


@pytest.mark.parametrize("command", ["eval", "generate", "distill"])
def test_every_command_ends_with_code_20(model_folder: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    cut_short(model_folder)
    (model_folder.parent / "text.txt").write_text("the still room keeps spirits and waters\n" * 50)
    data = str(model_folder.parent / "text.txt")
    words = {
        "eval": ["--model", str(model_folder), "--data", data],
        "generate": [str(model_folder), "--prompt", "the"],
        "distill": [
            "--teacher",
            str(model_folder),
            "--data",
            data,
            "--student",
            "builtin:student",
            "--out",
            str(model_folder.parent / "run"),
        ],
    }
    with pytest.raises(SystemExit) as caught:
        main([command, *words[command], "--device", "cpu"])
    assert caught.value.code == 20
    assert "cannot use the weights" in " ".join(capsys.readouterr().err.split())


def test_evaluation_refuses_what_training_refuses(model_folder: Path, world: Path) -> None:
    rewrite(model_folder, lambda tensors: tensors.pop("lm_head.weight"))
    with refusals.refused(BrokenAtStart, "", "lm_head.weight"):
        assess(str(model_folder), str(world / "train.jsonl"), device="cpu")
