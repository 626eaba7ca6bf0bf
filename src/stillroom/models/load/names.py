"""The folder or address of a run names the student in it."""

from __future__ import annotations

from pathlib import Path

from stillroom.errors import BrokenAtStart
from stillroom.remote import here, is_in_store

STUDENT = "student"


def model_name(name: str) -> str:
    """The student's folder if `name` is the folder of a run, else the name unchanged. An address is copied here."""
    folder = here(name).expanduser()
    if not folder.is_dir() or not is_run(folder):
        return str(folder) if is_in_store(name) else name
    student = folder / STUDENT
    if not (student / "config.json").exists():
        raise BrokenAtStart(
            f"{name} is the folder of a run that has no student yet",
            where=str(student),
            advice=[f"finish it: stillroom resume {name}", "name the folder of a model"],
        )
    return str(student)


def run_of(name: str) -> Path | None:
    """The folder of the run whose student a name means: the run's own folder, or the student's in it."""
    folder = here(name).expanduser()
    owner = folder.resolve().parent if folder.name == STUDENT else folder
    return owner if folder.is_dir() and is_run(owner) else None


def is_run(folder: Path) -> bool:
    """Whether a folder has a file of events and no weights beside it."""
    return (folder / "events.jsonl").exists() and not any(folder.glob("*.safetensors"))
