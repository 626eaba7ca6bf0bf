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
from stillroom.engine.building.shrink_student import cut_student, student_name, unused_name
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
from stillroom.teachers.make import open_live, unused_teacher_settings
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
    uses_teacher = Curriculum.of(config).uses_teacher
    if uses_teacher and not uses_cache(config):
        check_quantisation(config.teacher, device)
    notes = unused_teacher_settings(config)
    is_paired = reads_its_own_tokens(config) and uses_teacher
    is_cut = config.student.init == "shrink"
    asks_teacher = is_paired or (uses_teacher and not uses_cache(config))
    tokenizer, teacher_tokenizer = _tokenizers(config, notes, asks_teacher=asks_teacher)
    matched = matched_tokens(tokenizer, teacher_tokenizer) if is_paired else None
    reading = Reading(teacher_tokenizer if is_paired else tokenizer, matched)
    kept = teacher = corpus = None
    dtype = teacher_dtype(config, device)
    cache = cache_folder(config, folder, reading, dtype) if uses_cache(config) else None
    is_stored = cache is not None and (config.teacher.cache != AUTO or is_there(cache))
    if (uses_teacher and not is_stored) or is_cut:
        teacher_tokenizer = teacher_tokenizer or load_tokenizer(config.teacher, config.teacher.model)
        teacher = open_live(config.teacher, dtype, teacher_tokenizer)
    if is_cut:
        assert teacher is not None
        cut, corpus = _cut(config, teacher.network, tokenizer, device, folder=folder, parallel=parallel, tell=tell)
        kept = cut.kept_layers
        notes += [*unused_name(config.student), *cut.notes]
        student = try_model(cut.model, tokenizer, name=student_name(config), role="student")
        teacher = teacher if uses_teacher and not is_stored else None
    else:
        student = _opened(config, tokenizer)
    student, adapter = adapted(config, student)
    size = _stored_size(cache if is_stored else None, reading, student.anatomy.vocab_rows)
    if teacher is not None and not is_paired:
        size = agree_on_vocabulary(teacher_tokenizer, tokenizer, teacher.anatomy.vocab_rows, size)
        notes += opening_difference(teacher_tokenizer, tokenizer, config.data.bos)
    tokenizers = {"student": tokenizer, **({"teacher": teacher_tokenizer} if teacher or is_paired else {})}
    return Models(
        tokenizer,
        teacher,
        student,
        size,
        (*notes, *student.notes, *(teacher.notes if teacher else ())),
        kept,
        {role: vocabulary_hash(table) for role, table in tokenizers.items()},
        cache,
        corpus,
        adapter,
        teacher_tokenizer if is_paired else None,
        matched,
    )


def _stored_size(cache: Path | None, reading: Reading, student_rows: int) -> int:
    """The size of the student's vocabulary, or of that of the answers it learns from. Raise if they are not for it."""
    if cache is None:
        return student_rows
    if reading.matched is None:
        return stored_vocabulary(cache, reading.tokenizer, student_rows)
    check_tokenizer(cache, reading.tokenizer)
    return student_rows


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


def teacher_dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.teacher.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.teacher.dtype)
        return dtype
    if device.type != "cuda":
        return torch.float32
    # A teacher that was trained in bf16 may overflow FP16; without native bf16 its products would be emulated.
    return torch.bfloat16 if facts_of(device).has_native_bf16 else torch.float16
