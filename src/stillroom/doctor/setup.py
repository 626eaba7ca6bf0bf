"""What the doctor looks at: a machine, a configuration, and what it names, each read once and only when looked at."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from stillroom.config import Config
from stillroom.core.errors import StillroomError
from stillroom.core.machine import main_memory, nvidia_driver, shared_memory_bytes
from stillroom.data import Corpus, open_data
from stillroom.data.preview import preview
from stillroom.doctor.rules import Settings
from stillroom.models import has_tokenizer, load_tokenizer
from stillroom.models.files import Source, fetch
from stillroom.precision.device import DeviceFacts, facts_of
from stillroom.precision.policy import choose, needs_fp32_weights
from stillroom.teachers.signals import AUTO
from stillroom.training.models import Models, load_models
from stillroom.training.schedule import Curriculum

_MOST_RECORDS = 5_000  # of each source that are looked at


@dataclass(frozen=True)
class Machine:
    """Plain facts, which a test can give without the machine."""

    device: DeviceFacts
    num_cores: int
    load: float  # processes that want a core, over the last minute
    num_threads: int
    asked_threads: str  # OMP_NUM_THREADS
    free_memory: int
    total_memory: int
    free_device_memory: int  # that of the machine where the device is a CPU
    free_disk: int
    driver: str  # of an NVIDIA GPU; empty where there is none
    torch_cuda: str  # the CUDA that torch was built for; empty for a CPU build
    num_gpus: int = 0  # that torch sees
    shared_memory: int | None = None  # bytes of /dev/shm; None where there is none


def read_machine(device: torch.device, folder: Path) -> Machine:
    memory = main_memory()
    free = int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else memory.available
    return Machine(
        device=facts_of(device),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        num_threads=torch.get_num_threads(),
        asked_threads=os.environ.get("OMP_NUM_THREADS", ""),
        free_memory=memory.available,
        total_memory=memory.total,
        free_device_memory=free,
        free_disk=shutil.disk_usage(folder).free,
        driver=nvidia_driver(),
        torch_cuda=torch.version.cuda or "",
        num_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        shared_memory=shared_memory_bytes(),
    )


class NotLooked(Exception):
    """Raised for a part that needs another one, which has a finding already."""


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
        self._config = config
        self._failed: set[str] = set()
        if config is not None and config.teacher.cache == AUTO:
            # A cache that is made by the run is not there yet.
            self.notes += ("teacher.cache = 'auto' is written by the run: the teacher is looked at as it is",)
            live = config.teacher.model_copy(update={"cache": None})
            self._config = config.model_copy(update={"teacher": live})

    @property
    def config(self) -> Config:
        if self._config is None:
            raise NotLooked
        return self._config

    @property
    def has_config(self) -> bool:
        return self._config is not None

    @cached_property
    def settings(self) -> Settings:
        """The configuration, with the precision that this device gets."""
        try:
            mode, _reason = self.precision
        except StillroomError:  # the rule of the precision says so
            mode = ""
        return Settings(self.config.to_dict(), mode=mode)

    @property
    def precision(self) -> tuple[str, str]:
        """The mode, and why. Raises for one that the device cannot do."""
        asked = self.config.precision
        is_wide = needs_fp32_weights(self.config)
        return choose(asked.mode, self.machine.device, moments=asked.moments, is_wide=is_wide)

    @property
    def uses_teacher(self) -> bool:
        return Curriculum.of(self.config).uses_teacher

    @property
    def disk_folder(self) -> Path:
        return Path.cwd()

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

    @cached_property
    def _sources(self) -> dict[str, Source]:
        """The folders of the models that are loaded."""
        config = self.config
        sections: dict[str, Any] = {}
        if config.student.init != "shrink":
            sections["student"] = config.student
        is_loaded = self.uses_teacher and not config.teacher.cache and not config.teacher.is_student
        if is_loaded or config.student.reads_as_teacher:
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
