"""Load teacher and student, probe them, and check that they share a vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stillroom.config import Config
from stillroom.data import Corpus, opening_difference
from stillroom.data.chat import prints_day
from stillroom.engine.building.adapt_student import adapted
from stillroom.engine.building.shrink_student import cut_student, student_name
from stillroom.engine.building.vocabulary_build import check_weights, take_vocabulary
from stillroom.models import (
    LoadedModel,
    has_tokenizer,
    load_tokenizer,
    open_student,
    try_model,
    vocabulary_hash,
)
from stillroom.models.adapter.attach import Adapter
from stillroom.models.shrink.cut import Cut
from stillroom.parallel import Parallel
from stillroom.teachers.build import (
    TeacherSource,
    check_teacher,
    find_source,
    needs_own_tokenizer,
    open_network,
    shared_vocabulary,
)


@dataclass(frozen=True)
class Models:
    """Both models, and where the teacher's answers come from."""

    source: TeacherSource
    loaded_teacher: LoadedModel | None  # None when nothing asks for it
    loaded_student: LoadedModel
    vocab_size: int
    notes: tuple[str, ...]
    kept_layers: tuple[int, ...] | None = None  # of the teacher, where the student was cut from it
    vocabularies: dict[str, str] = field(default_factory=dict)  # hash of each model's table of tokens
    corpus: Corpus | None = None  # the run's data, where a cut was chosen on it
    adapter: Adapter | None = None  # in the student

    @property
    def tokenizer(self) -> Any:
        """The student's."""
        return self.source.tokenizer

    @property
    def teacher_tokenizer(self) -> Any:
        """The teacher's where it reads the text in its own tokens, else None."""
        return self.source.own_tokenizer if self.source.is_paired else None

    @property
    def prints_day(self) -> bool:
        """Whether a chat template that prints the data asks for the time."""
        return any(prints_day(one) for one in (self.tokenizer, self.teacher_tokenizer) if one is not None)

    @property
    def teacher(self) -> Any:
        """The teacher's network, or None."""
        return self.loaded_teacher.network if self.loaded_teacher else None

    @property
    def student(self) -> Any:
        return self.loaded_student.network


def load_models(
    config: Config,
    device: torch.device,
    *,
    folder: Path | None = None,
    parallel: Parallel | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> Models:
    """Load and probe both models, and check that they share a vocabulary.

    `folder` is the run's: a student cut from its teacher stores the choice of layers there.
    """
    is_cut = config.student.init == "shrink"
    check_teacher(config, device)
    notes: list[str] = []
    tokenizer, own_tokenizer = _tokenizers(config, notes, asks_teacher=needs_own_tokenizer(config))
    source = find_source(config, device, folder, tokenizer, own_tokenizer)
    if own_tokenizer is None and (is_cut or (source.is_asked and not source.is_stored)):
        source = replace(source, own_tokenizer=load_tokenizer(config.teacher, config.teacher.model))
    teacher = open_network(config, source, parallel) if source.is_loaded or is_cut else None
    kept = corpus = None
    if is_cut:
        assert teacher is not None
        cut, corpus = _cut(config, teacher.network, tokenizer, device, folder=folder, parallel=parallel, tell=tell)
        kept = cut.kept_layers
        notes += cut.notes
        student = try_model(cut.model, tokenizer, name=student_name(config), role="student")
        teacher = teacher if source.is_loaded else None
    else:
        student = _opened(config, tokenizer)
    student, adapter = adapted(config, student)
    size = shared_vocabulary(config, source, teacher, student.anatomy.vocab_rows)
    is_asked_here = teacher is not None or source.is_served
    if is_asked_here and not source.is_paired:
        notes += opening_difference(source.own_tokenizer, tokenizer, config.data.bos)
    tokenizers = {"student": tokenizer}
    if is_asked_here or source.is_paired:
        tokenizers["teacher"] = source.own_tokenizer
    return Models(
        source,
        teacher,
        student,
        size,
        (*notes, *student.notes, *(teacher.notes if teacher else ())),
        kept,
        {role: vocabulary_hash(table) for role, table in tokenizers.items()},
        corpus,
        adapter,
    )


def _tokenizers(config: Config, notes: list[str], *, asks_teacher: bool) -> tuple[Any, Any]:
    """The student's tokenizer, and the teacher's where it is needed: to ask it, or for a student that brings none."""
    has_own = not config.student.reads_as_teacher and has_tokenizer(config.student, config.student.model)
    teachers = load_tokenizer(config.teacher, config.teacher.model) if asks_teacher or not has_own else None
    if has_own:
        return load_tokenizer(config.student, config.student.model), teachers
    if config.student.vocabulary == "teacher":
        check_weights(config)
    else:
        notes.append("the student brings no tokenizer: it takes the teacher's")
    return teachers, teachers


def _opened(config: Config, tokenizer: Any) -> LoadedModel:
    """The student of its own folder, with the teacher's vocabulary where that is asked for."""

    def change(network: Any) -> list[str]:
        if config.student.vocabulary == "own":
            return []
        has_own = has_tokenizer(config.student, config.student.model)
        own = load_tokenizer(config.student, config.student.model) if has_own else None
        return take_vocabulary(network, own, tokenizer)

    return open_student(config.student, tokenizer, seed=config.train.seed, change=change)


def _cut(
    config: Config, network: Any, tokenizer: Any, device: torch.device, **options: Any
) -> tuple[Cut, Corpus | None]:
    """The student cut from the teacher, and the run's data if that was opened to choose the cut."""
    opened: list[Corpus] = []
    cut = cut_student(config, network, tokenizer, device, keep_data=opened.append, **options)
    return cut, next(iter(opened), None)
