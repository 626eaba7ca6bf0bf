"""What is exported: the student of a run, or any model, with what is known about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stillroom.config.schema import TeacherConfig
from stillroom.errors import ConfigError
from stillroom.export.card import Origin
from stillroom.models import LoadedModel, open_teacher
from stillroom.models.load.names import model_name, run_of
from stillroom.telemetry.record import Evaluated, LoggedRun, read_evaluation, section
from stillroom.telemetry.wording import as_number


@dataclass(frozen=True)
class Source:
    """A model in FP32, its name, and the records of the run that made it."""

    name: str
    loaded: LoadedModel
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    evaluated: Evaluated = field(default_factory=Evaluated)
    origin: Origin | None = None  # of the student's weights; None where no run is known
    notes: Sequence[str] = ()

    @property
    def texts(self) -> list[str]:
        """The run's held-out and training data, as far as they are files."""
        data = self.config.get("data") or {}
        train = data.get("train") or []
        paths = [train] if isinstance(train, str) else [source.get("path") for source in train]
        return [path for path in (data.get("eval"), *paths) if isinstance(path, str) and path]


def open_source(name: str) -> Source:
    """Load the model of a run's folder, a model's folder, a hub id or a builtin name."""
    model = model_name(name)
    loaded = open_teacher(TeacherConfig(model=model), torch.float32)
    if getattr(loaded.network, "is_quantized", False):
        raise ConfigError(
            f"the weights of {name} are quantised: they cannot be written in another form",
            advice=["export the model as it was before it was quantised"],
        )
    folder = run_of(name)
    if folder is None:
        return Source(name, loaded, notes=loaded.notes)
    record, summary = _read(folder / "config.json"), _read(folder / "summary.json")
    notes: list[str] = []
    evaluated = read_evaluation(folder, notes)
    if evaluated.doubt:
        notes.append("the card is without the figures of `stillroom eval`: the student has changed since then")
    config, versions = _mapping(record, "config"), _mapping(record, "versions")
    origin = Origin.of(config, local=_mapping(record, "paths").keys(), layers=_layers(folder, loaded))
    return Source(name, loaded, config, versions, summary, evaluated, origin, (*loaded.notes, *notes))


def _layers(folder: Path, student: LoadedModel) -> tuple[int, int] | None:
    """(layers of the student, layers of its teacher), if the run's log says the latter."""
    of = as_number(section(LoggedRun.load(folder).start, "teacher").get("layers"))
    return (student.anatomy.num_layers, int(of)) if of else None


def _read(path: Path) -> dict[str, Any]:
    """A run's record; empty if it is not there or not whole: the card then says less."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}
