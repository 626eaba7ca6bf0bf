"""A model is tried once: what its trial found is kept by the contents of its files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from stillroom.config.schema import StudentConfig, TeacherConfig
from stillroom.models import load


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were run in a trial. Tiny ones are remembered too, in a cache of the test."""
    monkeypatch.setenv("STILLROOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "_REMEMBERED", 1)
    names: list[str] = []
    answers = load._check_causality

    def counted(network: Any, ids: Any, own: Any, tolerance: float, name: str) -> None:
        names.append(Path(name).name)
        answers(network, ids, own, tolerance, name)

    monkeypatch.setattr(load, "_check_causality", counted)
    return names


def opened(folder: Path, role: str) -> load.LoadedModel:
    if role == "teacher":
        return load.open_teacher(TeacherConfig(model=str(folder)), torch.float32)
    return load.open_student(StudentConfig(model=str(folder)), tiny.tokenizer(), seed=0)


@pytest.mark.parametrize("role", ["teacher", "student"])
def test_a_model_is_tried_once_whatever_its_folder_is_called(role: str, tmp_path: Path, tried: list[str]) -> None:
    first = opened(tiny.save_model(tmp_path / "first"), role)
    again = opened(Path(shutil.copytree(tmp_path / "first", tmp_path / "again")), role)
    assert tried == ["first"]
    assert (again.is_described, again.anatomy) == (first.is_described, first.anatomy)
    assert len(again.notes) == len(first.notes)
    assert again.network.config._attn_implementation == first.network.config._attn_implementation


def test_other_weights_or_another_version_are_tried_again(
    tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save_model(tmp_path / "model")
    opened(folder, "teacher")
    weights = load_file(folder / "model.safetensors")
    weights[sorted(weights)[0]] += 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    opened(folder, "teacher")
    monkeypatch.setattr(load, "_TRIAL_VERSION", 2)
    opened(folder, "teacher")
    assert len(tried) == 3


@pytest.mark.parametrize("contents", [b"", b"{}", b'{"is_described": 1}', b"\xff[" * 3])
def test_a_damaged_entry_is_ignored_with_a_note(contents: bytes, tmp_path: Path, tried: list[str]) -> None:
    folder = tiny.save_model(tmp_path / "model")
    first = opened(folder, "teacher")
    (entry,) = (tmp_path / "cache").rglob("trial-*.json")
    entry.write_bytes(contents)
    again = opened(folder, "teacher")
    assert len(tried) == 2 and len(again.notes) == len(first.notes) + 1
    assert len(opened(folder, "teacher").notes) == len(first.notes) and len(tried) == 2, "it was written anew"
