"""What the doctor looks at: a machine, a configuration, and what it names, each read once and only when looked at."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from stillroom.checks.doctor.facts import Machine
from stillroom.config import Config
from stillroom.curriculum import Curriculum
from stillroom.data import Corpus, open_data
from stillroom.data.preview import preview
from stillroom.engine.building.models import Models, load_models
from stillroom.errors import StillroomError
from stillroom.models import has_tokenizer, load_tokenizer
from stillroom.models.load.source import Source, fetch
from stillroom.teachers.spec import AUTO

_MOST_RECORDS = 5_000  # of each source that are looked at


class NotLooked(Exception):
    """Raised by a part that rests on another one, of which a finding tells already."""


class PartFailed(Exception):
    """A part that cannot be had, and the subject that its error belongs to."""

    def __init__(self, error: StillroomError, subject: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.subject = subject


_SUBJECTS = {"sources": "models", "tokenizers": "tokenizers", "preview": "data", "corpus": "data", "models": "models"}


class Setup:
    """A configuration on a machine. A part that fails raises its error once, and `NotLooked` from then on."""

    def __init__(self, machine: Machine, config: Config | None, *, device: torch.device, notes: tuple[str, ...] = ()):
        self.machine = machine
        self.device = device
        self.notes = notes
        if config is not None and config.teacher.cache == AUTO:
            self.notes += ("teacher.cache = 'auto' is written by the run: the teacher is looked at as it is",)
        self._config = _with_live_teacher(config)
        self._failed: set[str] = set()

    @property
    def config(self) -> Config:
        if self._config is None:
            raise NotLooked
        return self._config

    @property
    def has_config(self) -> bool:
        return self._config is not None

    def part(self, name: str) -> Any:
        """One of the properties below."""
        if name in self._failed:
            raise NotLooked
        try:
            return getattr(self, f"_{name}")
        except StillroomError as error:
            self._failed.add(name)
            raise PartFailed(error, _SUBJECTS[name]) from error
        except (PartFailed, NotLooked):
            self._failed.add(name)
            raise

    @property
    def uses_teacher(self) -> bool:
        return Curriculum.of(self.config).uses_teacher

    @cached_property
    def _sources(self) -> dict[str, Source]:
        """The folders of the models that are loaded."""
        config = self.config
        sections: dict[str, Any] = {}
        if config.student.init != "shrink":
            sections["student"] = config.student
        if (self.uses_teacher and not config.teacher.cache) or config.student.reads_as_teacher:
            sections["teacher"] = config.teacher
        return {role: fetch(section, section.model, weights=False) for role, section in sections.items()}

    @cached_property
    def _tokenizers(self) -> dict[str, Any]:
        """The tokenizer of each model that brings one."""
        self.part("sources")
        config, found = self.config, {}
        if not config.student.reads_as_teacher and has_tokenizer(config.student, config.student.model):
            found["student"] = load_tokenizer(config.student, config.student.model)
        if "student" not in found or "teacher" in self._sources:
            found["teacher"] = load_tokenizer(config.teacher, config.teacher.model)
        return found

    @property
    def tokenizer(self) -> Any:
        """The one that training reads its text with."""
        found = self.part("tokenizers")
        return found.get("student") or found["teacher"]

    @cached_property
    def _preview(self) -> dict[str, Any]:
        """What `stillroom data` says of the first records."""
        data = self.config.data
        most = min(data.max_records or _MOST_RECORDS, _MOST_RECORDS)
        return preview(data.model_copy(update={"max_records": most}), self.tokenizer, num_rows=200)

    @cached_property
    def _corpus(self) -> Corpus:
        """Training and held-out rows, as a run would have them."""
        self.part("preview")
        corpus: Corpus = open_data(self.config.data, self.tokenizer)
        return corpus

    @cached_property
    def _models(self) -> Models:
        """Both models, loaded and tried."""
        self.part("tokenizers")
        return load_models(self.config, self.device, folder=None)

    @property
    def disk_folder(self) -> Path:
        return Path.cwd()


def _with_live_teacher(config: Config | None) -> Config | None:
    """A cache that is made by the run is not there yet, and has no folder to lie beside."""
    if config is None or config.teacher.cache != AUTO:
        return config
    return config.model_copy(update={"teacher": config.teacher.model_copy(update={"cache": None})})
