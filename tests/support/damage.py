"""Ways to damage a model folder, and whether a folder is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file

from stillroom.config.schema import StudentConfig, TeacherConfig
from stillroom.core.errors import StillroomError
from stillroom.models import LoadedModel, open_student, open_teacher

Change = Callable[[dict[str, Any]], None]


def ask(folder: Path) -> LoadedModel:
    return open_teacher(TeacherConfig(model=str(folder)), torch.float32)


def train(folder: Path) -> LoadedModel:
    return open_student(StudentConfig(model=str(folder)), tiny.tokenizer(), seed=0)


@dataclass(frozen=True)
class Refusal:
    """The error with which a folder was refused; true if nothing is wrong with it: `assert refused(folder, "word")`."""

    error: StillroomError | None
    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.problems


def refused(folder: Path, *words: str, how: Callable[[Path], LoadedModel] = ask, code: int = 20) -> Refusal:
    """Whether a folder is refused with this exit code, with advice, and with a message that has all the words."""
    try:
        how(folder)
    except StillroomError as error:
        problems = [f"{word!r} is not in: {error}" for word in words if word not in str(error)]
        problems += [f"exit code {error.exit_code}, not {code}"] if error.exit_code != code else []
        problems += ["no advice"] if not error.advice else []
        return Refusal(error, tuple(problems))
    return Refusal(None, ("not refused",))


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
