"""Load teacher and student, probe them, and check that they share a vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stillroom.config import Config
from stillroom.curriculum import Curriculum
from stillroom.data import Corpus, opening_difference
from stillroom.data.chat import prints_day
from stillroom.engine.building.adapt_student import adapted
from stillroom.engine.building.cache_build import (
    AUTO,
    Reading,
    cache_folder,
    check_tokenizer,
    is_there,
    stored_vocabulary,
    uses_cache,
)
from stillroom.engine.building.pairing import matched_tokens, reads_its_own_tokens
from stillroom.engine.building.served_build import asks_server, served_rows
from stillroom.engine.building.shard_teacher import reads_layers_one_by_one
from stillroom.engine.building.shrink_student import cut_student, student_name
from stillroom.engine.building.vocabulary_build import check_weights, take_vocabulary
from stillroom.models import (
    LoadedModel,
    agree_on_vocabulary,
    has_tokenizer,
    load_tokenizer,
    open_student,
    try_model,
    vocabulary_hash,
)
from stillroom.models.adapter.attach import Adapter
from stillroom.models.shrink.cut import Cut
from stillroom.objectives.objective import Matched
from stillroom.parallel import Parallel
from stillroom.precision.device import facts_of
from stillroom.teachers.elsewhere import open_remote
from stillroom.teachers.make import check_teacher_settings, open_live
from stillroom.teachers.placement import open_streamed
from stillroom.teachers.quantised import check_quantisation


@dataclass(frozen=True)
class Models:
    """Both models with the tokenizer they share."""

    tokenizer: Any
    loaded_teacher: LoadedModel | None  # None when nothing asks for it
    loaded_student: LoadedModel
    vocab_size: int
    notes: tuple[str, ...]
    kept_layers: tuple[int, ...] | None = None  # of the teacher, where the student was cut from it
    vocabularies: dict[str, str] = field(default_factory=dict)  # hash of each model's table of tokens
    cache: Path | None = None  # folder of the teacher's stored answers
    corpus: Corpus | None = None  # the run's data, where a cut was chosen on it
    adapter: Adapter | None = None  # in the student
    teacher_tokenizer: Any = None  # where the teacher reads the text in its own tokens
    matched: Matched | None = None  # the tokens that both vocabularies then have

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
    uses_teacher, is_cut = Curriculum.of(config).uses_teacher, config.student.init == "shrink"
    if uses_teacher and not uses_cache(config):
        check_quantisation(config.teacher, device)
    check_teacher_settings(config)
    notes: list[str] = []
    source = _answers_from(config, device, folder, notes)
    tokenizer, teacher_tokenizer, is_paired = source.tokenizer, source.teacher_tokenizer, source.is_paired
    kept = teacher = corpus = None
    if (uses_teacher and not source.is_stored) or is_cut:
        teacher_tokenizer = teacher_tokenizer or load_tokenizer(config.teacher, config.teacher.model)
        teacher = None if source.is_served else _opened_teacher(config, source.dtype, teacher_tokenizer, parallel)
    if is_cut:
        assert teacher is not None
        cut, corpus = _cut(config, teacher.network, tokenizer, device, folder=folder, parallel=parallel, tell=tell)
        kept = cut.kept_layers
        notes += cut.notes
        student = try_model(cut.model, tokenizer, name=student_name(config), role="student")
        teacher = teacher if uses_teacher and not source.is_stored else None
    else:
        student = _opened(config, tokenizer)
    student, adapter = adapted(config, student)
    size = _stored_size(source, student.anatomy.vocab_rows)
    if (teacher is not None or source.is_served) and not is_paired:
        size = agree_on_vocabulary(teacher_tokenizer, tokenizer, _teacher_rows(config, teacher, size), size)
        notes += opening_difference(teacher_tokenizer, tokenizer, config.data.bos)
    has_teachers = teacher is not None or source.is_served or is_paired
    tokenizers = {"student": tokenizer, **({"teacher": teacher_tokenizer} if has_teachers else {})}
    return Models(
        tokenizer,
        teacher,
        student,
        size,
        (*notes, *student.notes, *(teacher.notes if teacher else ())),
        kept,
        {role: vocabulary_hash(table) for role, table in tokenizers.items()},
        source.cache,
        corpus,
        adapter,
        teacher_tokenizer if is_paired else None,
        source.reading.matched,
    )


@dataclass(frozen=True)
class _Source:
    """Where the teacher's answers come from, and in whose tokens both models read the text."""

    tokenizer: Any  # the student's
    teacher_tokenizer: Any  # None where nothing needs it
    reading: Reading
    dtype: torch.dtype  # of a teacher that is loaded
    cache: Path | None
    is_paired: bool  # the teacher reads its own tokens
    is_stored: bool  # all answers are in the cache already
    is_served: bool


def _answers_from(config: Config, device: torch.device, folder: Path | None, notes: list[str]) -> _Source:
    uses_teacher = Curriculum.of(config).uses_teacher
    is_paired = reads_its_own_tokens(config) and uses_teacher
    asks_teacher = is_paired or (uses_teacher and not uses_cache(config))
    tokenizer, teachers = _tokenizers(config, notes, asks_teacher=asks_teacher)
    matched = matched_tokens(tokenizer, teachers) if is_paired else None
    reading = Reading.of(config, teachers if is_paired else tokenizer, matched)
    dtype = teacher_dtype(config, device)
    cache = cache_folder(config, folder, reading, dtype) if uses_cache(config) else None
    is_stored = cache is not None and (config.teacher.cache != AUTO or is_there(cache))
    is_served = asks_server(config) and not is_stored
    return _Source(tokenizer, teachers, reading, dtype, cache, is_paired, is_stored, is_served)


def _stored_size(source: _Source, student_rows: int) -> int:
    """The size of the student's vocabulary, or of that of the answers it learns from. Raise if they are not for it."""
    if source.cache is None or not source.is_stored:
        return student_rows
    if source.reading.matched is None:
        return stored_vocabulary(source.cache, source.reading.tokenizer, student_rows)
    check_tokenizer(source.cache, source.reading.tokenizer)
    return student_rows


def _teacher_rows(config: Config, teacher: LoadedModel | None, student_rows: int) -> int:
    return served_rows(config.teacher, student_rows) if teacher is None else teacher.anatomy.vocab_rows


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


def _opened_teacher(config: Config, dtype: torch.dtype, tokenizer: Any, parallel: Parallel | None) -> LoadedModel:
    """The teacher of this process, or what the process that holds it says of it."""
    if parallel is not None and parallel.link is not None:
        return open_remote(parallel.link, tokenizer)
    if reads_layers_one_by_one(config, parallel):
        return open_streamed(config.teacher, dtype, tokenizer, is_to_stay=False)
    return open_live(config.teacher, dtype, tokenizer)


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


def teacher_dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.teacher.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.teacher.dtype)
        return dtype
    if device.type != "cuda":
        return torch.float32
    # A teacher that was trained in bf16 may overflow FP16; without native bf16 its products would be emulated.
    return torch.bfloat16 if facts_of(device).has_native_bf16 else torch.float16
