"""Ways to damage a model folder, and the question whether it was refused as it should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from stillroom.config.schema import StudentConfig, TeacherConfig
from stillroom.errors import StillroomError
from stillroom.models import LoadedModel, open_student, open_teacher

Change = Callable[[dict[str, Any]], None]


def ask(folder: Path) -> LoadedModel:
    return open_teacher(TeacherConfig(model=str(folder)), torch.float32)


def train(folder: Path) -> LoadedModel:
    return open_student(StudentConfig(model=str(folder)), tiny.tokenizer(), seed=0)


def refused(folder: Path, *words: str, how: Callable[[Path], LoadedModel] = ask, code: int = 20) -> StillroomError:
    with pytest.raises(StillroomError) as caught:
        how(folder)
    error = caught.value
    assert error.exit_code == code, error
    assert error.advice, "every end says what to try"
    for word in words:
        assert word in str(error), f"{word!r} is not in: {error}"
    return error


def edit(folder: Path, name: str = "config.json", **values: Any) -> None:
    path = folder / name
    table = json.loads(path.read_text())
    path.write_text(json.dumps({**table, **values}))


def rewrite(folder: Path, change: Change) -> None:
    """Load the tensors, change the table, save it again."""
    tensors = dict(load_file(folder / "model.safetensors"))
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
