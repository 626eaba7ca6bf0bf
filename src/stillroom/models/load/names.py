"""Names of models that stand for something else: the folder of a run means the student in it."""

from __future__ import annotations

from pathlib import Path

from stillroom.errors import BrokenAtStart

STUDENT = "student"


def model_name(name: str) -> str:
    """The folder of the student where `name` is the folder of a run, otherwise the name as it is."""
    folder = Path(name).expanduser()
    if not folder.is_dir() or not is_run(folder):
        return name
    student = folder / STUDENT
    if not (student / "config.json").exists():
        raise BrokenAtStart(
            f"{name} is the folder of a run that has no student yet",
            where=str(student),
            advice=[f"finish it: stillroom resume {name}", "name the folder of a model"],
        )
    return str(student)


def is_run(folder: Path) -> bool:
    """A run keeps a record of its events and has no weights beside it."""
    return (folder / "events.jsonl").exists() and not any(folder.glob("*.safetensors"))
