"""Choose the teacher of a run, open it and wrap it.

A teacher answers from a cache, from a server, or live; a live one may be offloaded, streamed, sharded or quantised,
answer with a few tokens, or have other gates; and each may read the text in its own tokens. A new kind of teacher is a
file with its class and a line in `build_teacher`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stillroom.config import Config
from stillroom.config.schema import TRAINING_MODES
from stillroom.core.errors import ConfigError
from stillroom.data import Corpus
from stillroom.data.corpus import other_of
from stillroom.data.two_tokenizers.align import Coverage
from stillroom.models import LoadedModel, agree_on_vocabulary, anatomy_of, load_tokenizer
from stillroom.models.compile import CompiledBody
from stillroom.models.routers import find_gates
from stillroom.parallel import Parallel
from stillroom.precision.device import teacher_dtype
from stillroom.teachers.base import NO_TEACHER, RunContext, Teacher, Window
from stillroom.teachers.cache.build import cache_folder, cached_teacher, check_tokenizer, rows_asked, stored_vocabulary
from stillroom.teachers.cache.manifest import is_there, read_manifest
from stillroom.teachers.itself import AveragedTraining, student_as_teacher
from stillroom.teachers.live import live_teacher, open_live
from stillroom.teachers.paired import OtherRows, PairedTeacher, TokenSpace, matched_tokens, reads_its_own_tokens
from stillroom.teachers.placement import open_streamed, reads_layers_one_by_one, shard_teacher
from stillroom.teachers.quantize import check_quantisation, quantise_teacher
from stillroom.teachers.router.teacher import RouterTeacher, router_teacher
from stillroom.teachers.served.teacher import served_rows, served_teacher
from stillroom.teachers.several import BySource, check_memory, for_source, of_source
from stillroom.teachers.signals import AUTO, check_use, live_spec, served_spec
from stillroom.teachers.sparse import SparseTeacher
from stillroom.training.schedule import Curriculum


@dataclass(frozen=True)
class TeacherSource:
    """Where the teacher's answers come from, and in whose tokens both models read the text."""

    tokenizer: Any  # the student's
    own_tokenizer: Any  # the teacher's; None where nothing needs it
    space: TokenSpace
    dtype: torch.dtype  # of a teacher that is loaded
    cache: Path | None
    is_asked: bool  # an objective uses its answers
    is_paired: bool  # the teacher reads its own tokens
    is_stored: bool  # all answers are in the cache already
    is_served: bool
    is_student: bool = False  # the student's own network answers

    @property
    def is_loaded(self) -> bool:
        """Whether the answers need the teacher's weights here."""
        return self.is_asked and not self.is_stored and not self.is_served and not self.is_student


def check_teacher(config: Config, device: torch.device) -> None:
    """Raise for settings that cannot work together or not on this device, before anything is loaded."""
    is_quantised = config.teacher.quantisation != "none"
    if is_quantised and Curriculum.of(config).uses_teacher and not config.teacher.cache:
        check_quantisation(config.teacher, device)
    if config.teacher.server and not config.teacher.cache:
        served_spec(config)
    if config.teacher.router.mode == "sar-joint" and config.objectives.kd.top_k:
        raise ConfigError(
            "sar-joint sends the student's gradient into the teacher, which needs its whole distribution",
            where="objectives.kd.top_k",
            advice=["--set objectives.kd.top_k=0", "--set teacher.router.mode=sar"],
        )


def num_trained_by_teacher(config: Config, model: Any) -> int:
    """The number of gate weights that are trained; it counts when a precision is chosen."""
    router = config.teacher.router
    if model is None or router.mode not in TRAINING_MODES:
        return 0
    own = dict(model.named_parameters())
    names = [name for gate in find_gates(model, router.patterns) for name in gate.parameter_names()]
    return sum(int(own[name].numel()) for name in names)


def needs_own_tokenizer(config: Config) -> bool:
    """Whether the teacher's tokenizer is needed: to ask the teacher, or to read its own tokens."""
    if not Curriculum.of(config).uses_teacher:
        return False
    return _is_paired(config) or not (config.teacher.cache or config.teacher.is_student)


def _is_paired(config: Config) -> bool:
    """Whether each model reads its own tokens. Raise for what such a run cannot have."""
    return bool(config.objectives.span_weights) and reads_its_own_tokens(config)


def find_source(
    config: Config,
    device: torch.device,
    folder: Path | None,
    tokenizer: Any,
    own_tokenizer: Any,
    *,
    is_bf16: bool = False,
) -> TeacherSource:
    """Decide where answers come from. `folder` is the run's: an automatic cache lies next to it.

    `is_bf16`: a teacher whose dtype is left to us answers in BF16 on a CPU.
    """
    is_asked = Curriculum.of(config).uses_teacher
    is_paired = _is_paired(config) and is_asked
    matched = matched_tokens(tokenizer, own_tokenizer) if is_paired else None
    by_groups = "prefix_match" in config.objectives.span_weights
    space = TokenSpace(own_tokenizer if is_paired else tokenizer, matched, by_groups)
    dtype = torch.bfloat16 if is_bf16 else teacher_dtype(config.teacher.dtype, device)
    cache = cache_folder(config, folder, space, dtype) if is_asked and config.teacher.cache else None
    is_stored = cache is not None and (config.teacher.cache != AUTO or is_there(cache))
    is_served = is_asked and bool(config.teacher.server) and not is_stored
    is_student = is_asked and config.teacher.is_student
    return TeacherSource(
        tokenizer, own_tokenizer, space, dtype, cache, is_asked, is_paired, is_stored, is_served, is_student
    )


def open_network(config: Config, source: TeacherSource, parallel: Parallel | None) -> LoadedModel:
    """Load the teacher's weights as its placement wants them, and test it."""
    if config.teacher.placement == "shard" and reads_layers_one_by_one(config, parallel):
        return open_streamed(config.teacher, source.dtype, source.own_tokenizer, is_to_stay=False)
    return open_live(config.teacher, source.dtype, source.own_tokenizer)


def shared_vocabulary(config: Config, source: TeacherSource, loaded: LoadedModel | None, student_rows: int) -> int:
    """The number of tokens that both models answer over; the student's where each has its own tokens.

    Raise if the teacher's answers are not for this student.
    """
    if source.is_paired:
        if source.is_stored and source.cache is not None:
            check_tokenizer(source.cache, source.space.tokenizer)
        return student_rows
    if source.is_stored and source.cache is not None:
        return stored_vocabulary(source.cache, source.space.tokenizer, student_rows)
    if loaded is None and not source.is_served:
        return student_rows
    rows = served_rows(config.teacher, student_rows) if loaded is None else loaded.anatomy.vocab_rows
    return agree_on_vocabulary(source.own_tokenizer, source.tokenizer, rows, student_rows)


def build_teacher(
    config: Config,
    source: TeacherSource,
    loaded: LoadedModel | None,
    vocab_size: int,
    corpus: Corpus,
    run: RunContext,
    compiled: CompiledBody | None = None,
) -> Teacher:
    """The teacher of a run, and those of single sources, where data.train names them."""
    if source.is_asked and _has_contexts(source, corpus) and (problem := config.no_contexts()):
        raise ConfigError(
            f"records have text that the teacher alone reads before them: {problem}",
            where="data.train",
            advice=["leave the columns teacher_messages and teacher_prompt out"],
        )
    named = config.data.source_teachers if source.is_asked else {}
    if named:
        check_memory(config, is_main_live=source.is_loaded and source.cache is None)
    main = _one_teacher(config, source, loaded, vocab_size, corpus, _asked_alone(run, None, named), compiled)
    if not named:
        return main
    run.tell("held-out text is answered by the main teacher, also that of sources with their own")
    others: dict[str, Teacher] = {}
    for name, spec in named.items():
        own = for_source(config, spec)
        own_source, own_loaded = _open_own(own, source, run, vocab_size, name)
        others[name] = _one_teacher(
            own, own_source, own_loaded, vocab_size, corpus, _asked_alone(run, name, named), None, name
        )
    return BySource(main, others)


def _open_own(
    config: Config, main: TeacherSource, run: RunContext, vocab_size: int, name: str
) -> tuple[TeacherSource, LoadedModel | None]:
    """Open the teacher of a source. Raise unless it answers about the run's tokens."""
    source = find_source(config, run.precision.device, None, main.tokenizer, None)
    loaded, rows = None, anatomy_of(run.student.model).vocab_rows
    if source.is_loaded:
        source = replace(source, own_tokenizer=load_tokenizer(config.teacher, config.teacher.model))
        loaded = open_network(config, source, run.parallel)
    size = shared_vocabulary(config, source, loaded, rows)
    if size != vocab_size:
        raise ConfigError(
            f"the teacher of {name} answers over {size:,} tokens, and the run's over {vocab_size:,}",
            where="data.train[].teacher",
            advice=["teachers of a run have one vocabulary: use models of one family"],
        )
    return source, loaded


def _asked_alone(run: RunContext, name: str | None, named: Mapping[str, str]) -> RunContext:
    """The run as one of several teachers sees it: the batches of one source, or of all without a teacher."""
    if not named:
        return run
    return replace(run, window=lambda number: of_source(run.window(number), name, named))


def _one_teacher(
    config: Config,
    source: TeacherSource,
    loaded: LoadedModel | None,
    vocab_size: int,
    corpus: Corpus,
    run: RunContext,
    compiled: CompiledBody | None = None,
    name: str | None = None,
) -> Teacher:
    """One teacher. One that reads other rows than the student is given them wherever the run has rows."""
    device, space = run.precision.device, source.space
    has_contexts, average = _has_contexts(source, corpus), None
    if has_contexts:
        run = replace(run, window=_in_context(run.window))
    if source.is_paired:
        run = _on_own_rows(run)
        if loaded is not None:
            vocab_size = loaded.anatomy.vocab_rows
        elif source.cache is not None:
            vocab_size = read_manifest(source.cache).vocab_size
    if source.cache is not None:
        teacher: Teacher = cached_teacher(
            config, source.cache, space, corpus, device, source.dtype,
            loaded=loaded, vocab_size=vocab_size, window=run.window, tell=run.tell, source=name,
        )  # fmt: skip
    elif source.is_served:
        rows = rows_asked(corpus.train)
        teacher = served_teacher(config, source.tokenizer, vocab_size, rows, device, window=run.window)
    elif source.is_student:
        teacher, average = student_as_teacher(config.teacher, run, vocab_size)
    elif loaded is None:
        return NO_TEACHER
    else:
        if config.teacher.quantisation != "none":
            rows = rows_asked(corpus.train)
            loaded = quantise_teacher(config, loaded, rows, vocab_size, device, write=run.write)
        placement = None
        if config.teacher.placement == "shard":
            placement = shard_teacher(config, loaded, run.parallel, device, tell=run.tell)
        if config.teacher.router.mode != "frozen":
            teacher = router_teacher(config, loaded, vocab_size, run, is_paired=source.is_paired)
            teacher.original.listen(run.tell)
        elif config.teacher.signal.kind in ("auto", "dense"):
            teacher = live_teacher(config, loaded, vocab_size, device, compiled, placement, run.tell)
        else:
            spec = live_spec(config, space.shared if source.is_paired else "")
            live = live_teacher(config, loaded, vocab_size, device, tell=run.tell)
            notes = check_use(config, spec)
            teacher = SparseTeacher(live, spec, notes=notes, coarse=space.coarse(spec, vocab_size))
    if source.is_paired:
        training = teacher.training if isinstance(teacher, RouterTeacher) else None
        return PairedTeacher(teacher, source.own_tokenizer, corpus.coverage or Coverage(), training)
    if has_contexts:
        teacher = OtherRows(teacher)
    if average is not None:
        teacher.own_training = AveragedTraining(teacher, average)
    return teacher


def _has_contexts(source: TeacherSource, corpus: Corpus) -> bool:
    """Whether the teacher reads other text before records than the student."""
    return not source.is_paired and any(len(rows.other_lengths) for rows in (corpus.train, corpus.evaluation))


def _in_context(window: Window) -> Window:
    """The same windows as a teacher reads them after its contexts."""
    return lambda number: [batch.other or batch for batch in window(number)]


def _on_own_rows(run: RunContext) -> RunContext:
    """The same run as a teacher with its own tokenizer reads it."""
    return replace(
        run,
        window=lambda number: [other_of(batch) for batch in run.window(number)],
        held_out=lambda: [other_of(batch) for batch in run.held_out()],
    )
