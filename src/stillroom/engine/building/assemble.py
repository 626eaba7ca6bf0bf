"""Build a run from a configuration: the one place that makes its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stillroom.checkpoint import CheckpointStore
from stillroom.config import Config
from stillroom.curriculum import Curriculum
from stillroom.data import Corpus, Loader, open_data
from stillroom.data.spans.common import Coverage
from stillroom.engine.building.adapt_student import check_base, store_frozen
from stillroom.engine.building.budgets import make_snapshots
from stillroom.engine.building.cache_build import cached_teacher
from stillroom.engine.building.compilation import compile_bodies
from stillroom.engine.building.inner_build import make_objectives
from stillroom.engine.building.models import Models, teacher_dtype
from stillroom.engine.building.row_checks import check_rows
from stillroom.engine.building.served_build import asks_server, served_teacher
from stillroom.engine.building.teacher_build import quantise_teacher
from stillroom.engine.inject import make_hooks
from stillroom.engine.run import Run, held_out_batches
from stillroom.engine.run_folder.lock import FolderLock
from stillroom.guard import Guard
from stillroom.models import Student
from stillroom.objectives.clamps import Clamps
from stillroom.objectives.mix import Mix
from stillroom.objectives.objective import Planned
from stillroom.parallel import Parallel
from stillroom.precision import AdamW, ParameterGroup, Precision, resolve
from stillroom.schedule import Schedule, steps_of_run, warmup_of_run
from stillroom.teachers import Surroundings, Teacher, make_teacher
from stillroom.teachers.make import live_teacher, num_trained_by_teacher
from stillroom.teachers.paired import PairedTeacher
from stillroom.telemetry import EventLog


def build_run(
    config: Config,
    folder: Path,
    log: EventLog,
    *,
    device: torch.device,
    models: Models,
    inject: str = "",
    parallel: Parallel | None = None,
    lock: FolderLock | None = None,
    begun_in: str = "",
) -> Run:
    """Assemble a run. Train nothing, and write nothing but the log.

    `begun_in` is the precision of the checkpoint that the run continues from.
    """
    parallel = parallel or Parallel()
    torch.manual_seed(config.train.seed)
    corpus = open_corpus(config, models, parallel, log)
    loader = make_loader(config, corpus, parallel)
    precision = make_precision(config, models, device, begun_in)
    place_student(config, models, precision, parallel, log)
    both = models.student, models.teacher
    planned = make_objectives(config, *both, device, kept=models.kept_layers, matched=models.matched)
    optimizer = make_optimizer(models.student, precision, config, planned)
    parallel.prepare(optimizer)
    hooks = make_hooks(inject, tell=lambda text: log.write("note", text=text))
    schedule = make_schedule(config, loader.num_batches, parallel.size)
    student_body, teacher_body = compile_bodies(config, models, precision, schedule.num_steps * parallel.size, log)
    student = models.loaded_student.as_student(models.vocab_size, student_body)
    surroundings = make_surroundings(config, student, optimizer, precision, loader, corpus, log)
    teacher = build_teacher(config, models, corpus, surroundings, parallel, teacher_body)
    mix = make_mix(config, models.vocab_size, planned, log)
    check_sparse(config, teacher, mix)
    checkpoints = CheckpointStore(folder / "checkpoints", config.checkpoint.keep, hooks.checkpoint_point)
    return Run(
        config=config,
        folder=folder,
        device=device,
        tokenizer=models.tokenizer,
        student=student,
        teacher=hooks.teacher(teacher),
        corpus=corpus,
        loader=loader,
        mix=mix,
        curriculum=Curriculum.of(config),
        schedule=schedule,
        precision=precision,
        optimizer=optimizer,
        guard=Guard(config.guard),
        log=log,
        checkpoints=checkpoints,
        ring=make_snapshots(config, precision.mode, optimizer, checkpoints, log, parallel),
        hooks=hooks,
        parallel=parallel,
        lock=lock,
        vocabularies=models.vocabularies,
        adapter=models.adapter,
    )


def open_corpus(config: Config, models: Models, parallel: Parallel, log: EventLog) -> Corpus:
    """The data, opened unless choosing the models opened it. Log what a user should know about its rows."""
    corpus = models.corpus or open_data(
        config.data,
        models.tokenizer,
        tell=lambda text: log.write("note", text=text),
        teacher_tokenizer=models.teacher_tokenizer,
    )
    notes = check_rows(models, corpus)
    if len(config.data.sources) > 1 and config.train.gradient_accumulation_steps * parallel.size == 1:
        notes.append(
            "each step learns from one source: train.gradient_accumulation_steps above 1 mixes them within a step"
        )
    for text in notes:
        log.write("note", text=text)
    return corpus


def build_teacher(
    config: Config, models: Models, corpus: Corpus, surroundings: Surroundings, parallel: Parallel, compiled: Any
) -> Teacher:
    """From stored answers where the configuration names some, else from the model that was loaded."""
    size, device = models.vocab_size, surroundings.precision.device
    if models.teacher_tokenizer is not None and models.loaded_teacher is not None:
        own = models.loaded_teacher.anatomy.vocab_rows
        live = live_teacher(config, models.loaded_teacher, own, device, compiled)
        return PairedTeacher(live, models.teacher_tokenizer, corpus.coverage or Coverage())
    if models.cache is None and asks_server(config):
        return served_teacher(config, models.tokenizer, size, corpus.train, device, window=surroundings.window)
    if models.cache is None:
        loaded = quantise_teacher(config, models.loaded_teacher, corpus.train, size, device, write=surroundings.write)
        return make_teacher(config, loaded, size, surroundings, num_processes=parallel.size, compiled=compiled)
    return cached_teacher(
        config,
        models.cache,
        models.tokenizer,
        corpus,
        device,
        teacher_dtype(config, device),
        loaded=models.loaded_teacher,
        vocab_size=size,
        window=surroundings.window,
        tell=lambda text: surroundings.write("note", text=text),
    )


def check_sparse(config: Config, teacher: Teacher, mix: Mix) -> None:
    """Refuse what an objective cannot do with a few tokens, before anything is trained."""
    temperature = config.objectives.kd.temperature
    if teacher.kind in ("top-k", "sampled") and isinstance(temperature, float):
        mix.check_signal("top-k" if teacher.kind == "top-k" else "sampled", temperature)


def place_student(config: Config, models: Models, precision: Precision, parallel: Parallel, log: EventLog) -> None:
    """Move the student to the device. What is frozen under an adapter is stored as the precision says before that."""
    if models.adapter is not None:
        check_base(models.adapter, parallel)
        for text in store_frozen(config, models.adapter, precision):
            log.write("note", text=text)
    models.student.to(precision.device)


def make_loader(config: Config, corpus: Corpus, parallel: Parallel) -> Loader:
    train = config.train
    shuffled = Loader(
        corpus.train,
        batch_size=train.rows_per_batch,
        accumulation=train.gradient_accumulation_steps,
        seed=train.seed,
        rank=parallel.rank,
        num_ranks=parallel.size,
        groups_lengths=config.data.group_by_length,
    )
    if config.data.order == "shuffled":
        return shuffled
    num_steps = make_schedule(config, shuffled.num_batches, parallel.size).num_steps
    return shuffled.short_first(max(1, round(config.data.short_first_share * num_steps)))


def make_precision(config: Config, models: Models, device: torch.device, begun_in: str = "") -> Precision:
    """The mode that was asked for, the best for this device and size, or the one a continued run began in."""
    num_parameters = sum(parameter.numel() for parameter in models.student.parameters() if parameter.requires_grad)
    num_parameters += num_trained_by_teacher(config, models.teacher)
    asked = config.precision
    return resolve(asked.mode, device, config=asked, num_parameters=num_parameters, begun_in=begun_in)


def make_surroundings(
    config: Config,
    student: Student,
    optimizer: AdamW,
    precision: Precision,
    loader: Loader,
    corpus: Corpus,
    log: EventLog,
) -> Surroundings:
    """What a teacher may use of the run."""
    return Surroundings(
        student=student,
        optimizer=optimizer,
        precision=precision,
        learning_rate=config.train.learning_rate,
        window=loader.window,
        held_out=lambda: held_out_batches(config, corpus),
        write=log.write,
    )


def make_mix(config: Config, vocab_size: int, planned: Planned, log: EventLog) -> Mix:
    """The objectives with the clamps that were asked for. Log what the clamps cost."""
    clamps = Clamps(config.guard.logit_clamp, config.guard.loss_clamp)
    for text in clamps.check(vocab_size):
        log.write("note", text=text)
    return Mix(config.objectives, clamps=clamps, planned=planned)


def make_optimizer(student: Any, precision: Precision, config: Config, planned: Planned) -> AdamW:
    train = config.train
    trained = tuple((name, parameter) for name, parameter in student.named_parameters() if parameter.requires_grad)
    groups = [ParameterGroup("student", train.learning_rate, trained, in_fp32=config.student.adapter is not None)]
    projectors = tuple(planned.projectors.named_parameters(prefix="projectors"))
    if projectors:
        groups.append(ParameterGroup("projectors", train.projector_learning_rate or train.learning_rate, projectors))
    return precision.optimizer(groups, train)


def make_schedule(config: Config, num_batches: int, num_processes: int = 1) -> Schedule:
    train = config.train
    accumulation = train.gradient_accumulation_steps * num_processes
    num_steps = steps_of_run(num_batches, accumulation, train.epochs, train.max_steps)
    return Schedule(
        num_steps=num_steps,
        num_warmup=warmup_of_run(num_steps, train.warmup_steps, train.warmup_ratio, train.max_warmup_share),
        shape=train.schedule,
        floor=train.min_learning_rate_ratio,
    )
