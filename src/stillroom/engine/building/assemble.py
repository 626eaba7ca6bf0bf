"""Build a run from a configuration: the one place that makes its parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stillroom.checkpoint import CheckpointStore
from stillroom.config import Config
from stillroom.curriculum import Curriculum
from stillroom.data import Corpus, Loader, open_data
from stillroom.engine.building.adapt_student import check_base, store_frozen
from stillroom.engine.building.budgets import make_saves, make_snapshots
from stillroom.engine.building.compilation import compile_bodies
from stillroom.engine.building.inner_build import make_objectives
from stillroom.engine.building.input_check import InputCheck
from stillroom.engine.building.models import Models
from stillroom.engine.building.row_checks import check_rows
from stillroom.engine.building.strategy import check_strategy
from stillroom.engine.inject import make_hooks
from stillroom.engine.run import Run, held_out_batches
from stillroom.guard import Guard
from stillroom.locks import Lock
from stillroom.models import Student
from stillroom.models.adapter.attach import Adapter
from stillroom.models.adapter.outline import outline_of
from stillroom.models.anatomy import layers_if_any
from stillroom.objectives.clamps import Clamps
from stillroom.objectives.mix import Mix
from stillroom.objectives.objective import Planned
from stillroom.parallel import Parallel
from stillroom.precision import AdamW, ParameterGroup, Precision, resolve
from stillroom.schedule import Schedule, steps_of_run, warmup_of_run
from stillroom.teachers.base import RunContext, Teacher
from stillroom.teachers.build import build_teacher, num_trained_by_teacher
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
    lock: Lock | None = None,
    begun_in: str = "",
    begun_with: int = 0,
    inputs: InputCheck | None = None,
) -> Run:
    """Assemble a run. Train nothing, and write nothing but the log.

    `begun_in` is the precision of the checkpoint that the run continues from, `begun_with` its number of processes.
    `inputs` refuses other data than that of the checkpoint.
    """
    parallel = parallel or Parallel()
    num_shares = begun_with or parallel.size
    torch.manual_seed(config.train.seed)
    corpus = open_corpus(config, models, num_shares, log)
    if inputs is not None:
        inputs.data(config, corpus)
    loader = make_loader(config, corpus, parallel, num_shares)
    precision = make_precision(config, models, device, begun_in)
    adapter = place_student(config, models, precision, parallel, log)
    planned = objectives_of(config, models, device, parallel)
    optimizer = make_optimizer(models.student, precision, config, planned)
    parallel.prepare(optimizer)
    hooks = make_hooks(inject, tell=lambda text: log.write("note", text=text))
    schedule = make_schedule(config, loader.num_batches, num_shares)
    student, teacher_body = compiled_student(config, models, precision, schedule.num_steps * num_shares, parallel, log)
    context = make_context(config, student, optimizer, precision, loader, corpus, log, parallel)
    teacher = build_teacher(
        config, models.source, models.loaded_teacher, models.vocab_size, corpus, context, teacher_body
    )
    mix = make_mix(config, models.vocab_size, planned, log)
    check_sparse(config, teacher, mix)
    checkpoints = CheckpointStore(folder / "checkpoints", config.checkpoint.keep, hooks.checkpoint_point)
    ring = make_snapshots(config, precision.mode, optimizer, checkpoints, log, parallel)
    return Run(
        config=config,
        folder=folder,
        device=device,
        tokenizer=models.tokenizer,
        student=student,
        teacher=teacher,
        corpus=corpus,
        loader=loader,
        mix=mix,
        curriculum=Curriculum.of(config),
        schedule=schedule,
        precision=precision,
        optimizer=optimizer,
        guard=Guard(config.guard, vocab_size=models.vocab_size),
        log=log,
        checkpoints=checkpoints,
        ring=ring,
        saves=make_saves(config, precision.mode, optimizer, ring, log, parallel),
        hooks=hooks,
        parallel=parallel,
        num_shares=num_shares,
        lock=lock,
        vocabularies=models.vocabularies,
        adapter=adapter,
        inputs=inputs.found if inputs is not None else {},
    )


def objectives_of(config: Config, models: Models, device: torch.device, parallel: Parallel) -> Planned:
    """The objectives of the lesson. Attention maps are tried, for which a sharded student is gathered."""
    both = models.student, models.teacher
    with parallel.gathered():
        return make_objectives(config, *both, device, kept=models.kept_layers, matched=models.source.space.matched)


def compiled_student(
    config: Config, models: Models, precision: Precision, num_windows: int, parallel: Parallel, log: EventLog
) -> tuple[Student, Any]:
    """The student, and the teacher's compiled body. A sharded student is compiled where that is asked for by name."""
    is_sharded = parallel.is_sharded
    student_body, teacher_body = compile_bodies(
        config, models, precision, 0 if is_sharded else num_windows, log, is_sharded=is_sharded
    )
    return models.loaded_student.as_student(models.vocab_size, student_body), teacher_body


def open_corpus(config: Config, models: Models, num_shares: int, log: EventLog) -> Corpus:
    """The data, opened unless choosing the models opened it. Log what a user should know about its rows."""
    corpus = models.corpus or open_data(
        config.data,
        models.tokenizer,
        tell=lambda text: log.write("note", text=text),
        teacher_tokenizer=models.teacher_tokenizer,
    )
    notes = check_rows(models, corpus)
    if len(config.data.sources) > 1 and config.train.gradient_accumulation_steps * num_shares == 1:
        notes.append(
            "each step learns from one source: train.gradient_accumulation_steps above 1 mixes them within a step"
        )
    for text in notes:
        log.write("note", text=text)
    return corpus


def check_sparse(config: Config, teacher: Teacher, mix: Mix) -> None:
    """Refuse what an objective cannot do with a few tokens, before anything is trained."""
    temperature = config.objectives.kd.temperature
    if teacher.kind in ("top-k", "sampled") and isinstance(temperature, float):
        mix.check_signal("top-k" if teacher.kind == "top-k" else "sampled", temperature)


def place_student(
    config: Config, models: Models, precision: Precision, parallel: Parallel, log: EventLog
) -> Adapter | None:
    """Move the student to the device and shard it where that was asked for. Return its adapter.

    What is frozen under an adapter is stored as the precision says before that.
    """
    check_strategy(config, models, precision, parallel)
    adapter = models.adapter
    if adapter is not None:
        check_base(adapter, parallel)
        for text in store_frozen(config, adapter, precision):
            log.write("note", text=text)
        if parallel.is_sharded and parallel.is_first:  # which writes the merged student
            adapter = replace(adapter, outline=outline_of(adapter.network))
    if precision.keeps_half_weights and adapter is None:
        parallel.gather_in(torch.float16)
    models.student.to(precision.device)
    parallel.place(models.student, layers_if_any(models.student))
    return adapter


def make_loader(config: Config, corpus: Corpus, parallel: Parallel, num_shares: int = 0) -> Loader:
    train = config.train
    shuffled = Loader(
        corpus.train,
        batch_size=train.rows_per_batch,
        accumulation=train.gradient_accumulation_steps,
        seed=train.seed,
        rank=parallel.rank,
        num_ranks=parallel.size,
        num_shares=num_shares,
        groups_lengths=config.data.group_by_length,
    )
    if config.data.order == "shuffled":
        return shuffled
    num_steps = make_schedule(config, shuffled.num_batches, num_shares or parallel.size).num_steps
    return shuffled.short_first(max(1, round(config.data.short_first_share * num_steps)))


def make_precision(config: Config, models: Models, device: torch.device, begun_in: str = "") -> Precision:
    """The mode that was asked for, the best for this device and size, or the one a continued run began in."""
    num_parameters = sum(parameter.numel() for parameter in models.student.parameters() if parameter.requires_grad)
    num_parameters += num_trained_by_teacher(config, models.teacher)
    asked = config.precision
    return resolve(asked.mode, device, config=asked, num_parameters=num_parameters, begun_in=begun_in)


def make_context(
    config: Config,
    student: Student,
    optimizer: AdamW,
    precision: Precision,
    loader: Loader,
    corpus: Corpus,
    log: EventLog,
    parallel: Parallel,
) -> RunContext:
    """What a teacher may use of the run."""
    return RunContext(
        student=student,
        optimizer=optimizer,
        precision=precision,
        learning_rate=config.train.learning_rate,
        window=loader.window,
        held_out=lambda: held_out_batches(config, corpus),
        write=log.write,
        parallel=parallel,
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
