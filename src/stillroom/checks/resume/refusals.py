"""Change each input of a run in turn, and see that the run is not continued with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stillroom.checks.resume.states import Difference
from stillroom.config import Config
from stillroom.config.schema import StudentConfig, TeacherConfig
from stillroom.curriculum import Curriculum
from stillroom.engine.distill import resume
from stillroom.errors import InputsChanged, StillroomError
from stillroom.models.load.source import fetch
from stillroom.teachers.cache.in_store import folder_of
from stillroom.teachers.cache.manifest import NAME as CACHE
from stillroom.teachers.spec import AUTO, uses_cache


def refusals(run: Path, config: Config, scratch: Path, device: str) -> Iterator[tuple[str, Difference | None]]:
    """(input, what is wrong) for data, teacher and student of a run with a checkpoint; None: its change was refused.

    The run's configuration names a changed copy each time, and is put back. An input that is not read is left out.
    """
    path = run / "config.json"
    original = path.read_bytes()
    for name, key, value in _changed(config, scratch):
        (run / "summary.json").unlink(missing_ok=True)  # of a finished run nothing is continued
        try:
            path.write_bytes(_with(original, key, value))
            resume(run, device=device)
            wrong = "the run went on with a changed one"
        except InputsChanged:
            wrong = ""
        except StillroomError as error:
            wrong = f"another error came first: {error.what}"
        finally:
            path.write_bytes(original)
        yield name, Difference("input", name, wrong) if wrong else None


def _changed(config: Config, scratch: Path) -> Iterator[tuple[str, str, Any]]:
    """(input, the setting that names it, a changed one)."""
    yield "data", "data.train_share", config.data.train_share / 2  # as if half of the documents were gone
    asks_teacher, is_cut = Curriculum.of(config).uses_teacher, config.student.init == "shrink"
    if uses_cache(config) and config.teacher.cache != AUTO:
        yield "teacher", "teacher.cache", _copied(folder_of(str(config.teacher.cache)), scratch / "cache", CACHE)
    elif (asks_teacher or is_cut) and not config.teacher.server:
        yield "teacher", "teacher.model", _other_model(config.teacher, scratch / "teacher")
    if not is_cut:
        yield "student", "student.model", _other_model(config.student, scratch / "student")


def _other_model(section: StudentConfig | TeacherConfig, place: Path) -> str:
    """A copy of a model in which one bit of its weights is another; of one without weights, its configuration."""
    reads_weights = not (isinstance(section, StudentConfig) and section.init == "random")
    source = fetch(section, section.model, weights=reads_weights)
    if source.is_gguf:
        place = place.with_suffix(".gguf")
        _spoil(source.folder, place)
        return str(place)
    weights = sorted(source.folder.glob("*.safetensors"), key=lambda path: path.stat().st_size) if reads_weights else []
    return _copied(source.folder, place, weights[0].name if weights else "config.json")


def _copied(folder: Path, place: Path, spoiled: str) -> str:
    """A folder of links to the files of another one, but for one file, which is a changed copy."""
    place.mkdir()
    for path in folder.iterdir():
        if path.name != spoiled:
            (place / path.name).symlink_to(path.resolve())
    _spoil(folder / spoiled, place / spoiled)
    return str(place)


def _spoil(path: Path, place: Path) -> None:
    contents = bytearray(path.read_bytes())
    if path.suffix == ".json":
        told = json.loads(contents)
        told.get("teacher", told)["changed_by_verify_resume"] = "yes"
        contents = bytearray(json.dumps(told).encode())
    else:
        contents[-1] ^= 1
    place.write_bytes(contents)


def _with(contents: bytes, key: str, value: Any) -> bytes:
    """A run's config.json with one setting changed."""
    told = json.loads(contents)
    section, name = key.split(".")
    told["config"][section][name] = value
    told["paths"].pop(key, None)
    return json.dumps(told).encode()
