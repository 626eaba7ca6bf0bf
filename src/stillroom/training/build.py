"""Build a run from a configuration: the one place that makes its parts, one after another.

    data -> batches -> precision -> student on its device -> objectives -> optimizer -> schedule -> teacher -> storage

Each line of `build_run` needs only what stands above it. Models are loaded before (`training/models.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from stillroom.config import Config
from stillroom.core.errors import ConfigError
from stillroom.core.locks import Lock
from stillroom.data import Corpus, Loader, Rows, open_data
from stillroom.data.rollouts import RoundStore
from stillroom.losses.head.products import product_note
from stillroom.losses.mix import Clamps, Mix, Planned
from stillroom.models.anatomy import hidden_matrices
from stillroom.parallel import Parallel
from stillroom.precision import AdamW, ParameterGroup, Precision, resolve
from stillroom.precision.policy import needs_fp32_weights
from stillroom.teachers.base import RunContext, Teacher
from stillroom.teachers.build import build_teacher, num_trained_by_teacher
from stillroom.teachers.several import BySource
from stillroom.telemetry import EventLog
from stillroom.telemetry.events import Stages
from stillroom.training.checkpoint import CheckpointStore
from stillroom.training.faults import make_hooks
from stillroom.training.guard import Guard
from stillroom.training.memory import disk_note, make_saves, make_snapshots, state_copies
from stillroom.training.models import (
    Models,
    check_rows,
    compiled_student,
    num_trained,
    objectives_of,
    place_student,
)
from stillroom.training.preflight import InputCheck
from stillroom.training.rollouts import plan_rollouts
from stillroom.training.run import Hooks, Run, held_out_batches
from stillroom.training.schedule import Budget, Curriculum, Schedule, Work, plan_budget


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
    stages: Stages | None = None,
) -> Run:
    """Assemble a run. Train nothing, and write nothing but the log.

    `begun_in` is the precision of the checkpoint that the run continues from, `begun_with` its number of processes.
    `inputs` refuses other data than that of the checkpoint. `stages` announces what takes long.
    """
    parallel, stages = parallel or Parallel(), stages or Stages(log)
    initial_world_size = begun_with or parallel.size
    torch.manual_seed(config.train.seed)
    hooks = make_hooks(inject, tell=lambda text: log.write("note", text=text)) if inject else Hooks()

    # The data, and the order in which its rows become micro-batches.
    with stages.stage("reading and tokenizing the data"):
        corpus = open_corpus(config, models, initial_world_size, log)
    if inputs is not None:
        inputs.data(config, corpus)
    loader = make_loader(config, corpus, parallel, initial_world_size)
    schedule = Schedule.of(config, loader.num_batches, initial_world_size)
    budget = make_budget(config, models, corpus, schedule, initial_world_size)
    rollouts = None
    if config.rollouts is not None:
        rounds = RoundStore(folder / "rollouts")
        rollouts = plan_rollouts(config, config.rollouts, corpus, models.tokenizer, loader, schedule, parallel, rounds)
        loader = rollouts.loader
        if inputs is not None:
            inputs.prompts(rollouts.section.prompts, rollouts.prompts)

    # What is trained: the student, the objectives' projectors, and the optimizer of both.
    precision = make_precision(config, models, device, begun_in)
    operands = torch.float16 if precision.uses_half else precision.compute_dtype
    if operands is not None and (text := product_note(device, operands)):
        log.write("note", text=text)
    adapter = place_student(config, models, precision, parallel, log)
    planned = objectives_of(config, models, device, parallel)
    optimizer = make_optimizer(models.student, precision, config, planned)
    parallel.prepare(optimizer)
    num_windows = schedule.num_steps * initial_world_size
    student, teacher_body = compiled_student(config, models, precision, num_windows, parallel, log)

    # What it learns from.
    context = RunContext(
        student=student,
        optimizer=optimizer,
        precision=precision,
        learning_rate=config.train.learning_rate,
        window=loader.upcoming,
        held_out=lambda: held_out_batches(config, corpus, budget.num_batches),
        write=log.write,
        parallel=parallel,
    )
    is_plain = config.teacher.quantisation == "none" and config.teacher.placement == "device"
    with stages.stage("preparing the teacher", about=0.0 if is_plain else None):
        teacher = build_teacher(
            config, models.source, models.loaded_teacher, models.vocab_size, corpus, context, teacher_body
        )
    mix = make_mix(config, models.vocab_size, planned, log)
    check_sparse(config, teacher, mix)
    if rollouts is not None and rollouts.teacher is not None:
        mix.check_signal("top-k", rollouts.teacher.temperature)

    # What it returns to, and what it leaves behind.
    checkpoints = CheckpointStore(folder / "checkpoints", config.checkpoint.keep, hooks.checkpoint_point)
    is_gpu = device.type == "cuda"
    snapshots = make_snapshots(config, precision.mode, optimizer, checkpoints, log, parallel, is_gpu=is_gpu)
    saves = make_saves(config, precision.mode, optimizer, snapshots, log, parallel)
    if text := disk_note(config, state_copies(config, precision.mode, optimizer), folder):
        log.write("note", text=text)

    return Run(
        config=config,
        folder=folder,
        tokenizer=models.tokenizer,
        student=student,
        teacher=teacher,
        corpus=corpus,
        loader=loader,
        mix=mix,
        curriculum=Curriculum.of(config),
        schedule=schedule,
        budget=budget,
        precision=precision,
        optimizer=optimizer,
        guard=Guard(config.guard, vocab_size=models.vocab_size),
        log=log,
        checkpoints=checkpoints,
        snapshots=snapshots,
        saves=saves,
        hooks=hooks,
        parallel=parallel,
        initial_world_size=initial_world_size,
        lock=lock,
        adapter=adapter,
        inputs=inputs.found if inputs is not None else {},
        rollouts=rollouts,
        stages=stages,
    )


def open_corpus(config: Config, models: Models, initial_world_size: int, log: EventLog) -> Corpus:
    """Open the data unless choosing the models opened it. Log what a user should know about its rows."""
    corpus = models.corpus or open_data(
        config.data,
        models.tokenizer,
        tell=lambda text: log.write("note", text=text),
        teacher_tokenizer=models.teacher_tokenizer,
    )
    notes = check_rows(models, corpus)
    if len(config.data.sources) > 1 and config.train.gradient_accumulation_steps * initial_world_size == 1:
        notes.append(
            "each step learns from one source: train.gradient_accumulation_steps above 1 mixes them within a step"
        )
    for text in notes:
        log.write("note", text=text)
    return corpus


# Share of the steps that go from short rows to long ones with data.order = "short_first"; at most the first epoch.
_SHORT_FIRST_SHARE = 0.3


def make_loader(config: Config, corpus: Corpus, parallel: Parallel, initial_world_size: int = 0) -> Loader:
    """Order the rows of training: shuffled, or the short ones first for a share of the run."""
    train = config.train
    shuffled = Loader(
        corpus.train,
        batch_size=train.rows_per_batch,
        accumulation=train.gradient_accumulation_steps,
        seed=train.seed,
        rank=parallel.rank,
        num_ranks=parallel.size,
        initial_world_size=initial_world_size,
        groups_lengths=config.data.group_by_length,
    )
    if config.data.order == "shuffled":
        return shuffled
    num_steps = Schedule.of(config, shuffled.num_batches, initial_world_size or parallel.size).num_steps
    return shuffled.short_first(max(1, round(_SHORT_FIRST_SHARE * num_steps)))


def make_budget(config: Config, models: Models, corpus: Corpus, schedule: Schedule, initial_world_size: int) -> Budget:
    """Plan evaluations and samples by the counts of the run: the same after a resume, and on any machine."""
    train, held_out = config.train, config.eval
    rows = train.rows_per_batch * train.gradient_accumulation_steps * initial_world_size
    batch_rows = held_out.batch_size or train.rows_per_batch
    loaded = models.loaded_student if models.source.is_student else models.loaded_teacher
    loaded = loaded if config.teacher.cache is None else None
    teacher = loaded.anatomy if loaded is not None else None
    work = Work(
        num_steps=schedule.num_steps,
        step_tokens=rows * _mean_length(corpus.train),
        batch_tokens=batch_rows * _mean_length(corpus.evaluation),
        num_batches=-(-len(corpus.evaluation) // batch_rows),
        student=models.loaded_student.anatomy.num_parameters,
        teacher=teacher.num_parameters if teacher else 0,
        teacher_head=teacher.vocab_rows * teacher.width if teacher else 0,
        written_tokens=held_out.num_prompts * held_out.prompt_tokens,
    )
    return plan_budget(
        work,
        max_batches=None if held_out.max_batches == "auto" else held_out.max_batches,
        eval_steps=train.eval_steps,
        num_samples=held_out.samples,
        sample_tokens=held_out.sample_tokens,
    )


def _mean_length(rows: Rows) -> float:
    return rows.num_tokens / max(len(rows), 1)


def make_precision(config: Config, models: Models, device: torch.device, begun_in: str = "") -> Precision:
    """Take the mode that was asked for, the best for this device and size, or the one a continued run began in."""
    num_parameters = num_trained(models.student) + num_trained_by_teacher(config, models.teacher)
    asked = config.precision
    facts = models.facts if device.type == "cpu" else None
    return resolve(
        asked.mode,
        device,
        config=asked,
        num_parameters=num_parameters,
        num_by_muon=sum(one.numel() for one in muon_matrices(config, models.student).values()),
        begun_in=begun_in,
        facts=facts,
        is_wide=needs_fp32_weights(config),
    )


def muon_matrices(config: Config, student: Any) -> dict[str, nn.Parameter]:
    """The weights that Muon updates, by name; none where AdamW has all of them."""
    return hidden_matrices(student) if config.train.optimizer == "muon" else {}


def make_optimizer(student: Any, precision: Precision, config: Config, planned: Planned) -> AdamW:
    """Make the optimizer of the student, and of projectors at their own learning rate."""
    train = config.train
    trained = tuple((name, parameter) for name, parameter in student.named_parameters() if parameter.requires_grad)
    by_muon = frozenset(muon_matrices(config, student))
    is_adapted = config.student.adapter is not None
    groups = [ParameterGroup("student", train.learning_rate, trained, in_fp32=is_adapted, by_muon=by_muon)]
    formats = student_formats(config, student, precision)
    projectors = tuple(planned.projectors.named_parameters(prefix="projectors"))
    if projectors:
        groups.append(ParameterGroup("projectors", train.projector_learning_rate or train.learning_rate, projectors))
    return precision.optimizer(groups, train, formats)


def student_formats(config: Config, student: Any, precision: Precision) -> dict[str, str]:
    """The block format of each weight that `student.quantise` rounds; empty where nothing is rounded."""
    if not config.student.quantise:
        return {}
    if precision.keeps_half_weights:
        raise ConfigError(
            f"student.quantise rounds FP32 weights, and {precision.mode} keeps FP16 ones",
            where="student.quantise",
            advice=["--precision fp32", "--precision fp16-mixed"],
        )
    if any(hasattr(parameter, "to_local") for parameter in student.parameters()):
        raise ConfigError(
            "student.quantise rounds whole blocks, and fsdp cuts weights into shards",
            where="train.strategy",
            advice=["--set train.strategy=ddp", "leave student.quantise out"],
        )
    from stillroom.models.gguf import types_of

    return types_of(student, config.student.quantise, config.student.quantise_layers, where="student.quantise")


def make_mix(config: Config, vocab_size: int, planned: Planned, log: EventLog) -> Mix:
    """Mix the objectives with the clamps that were asked for. Log what the clamps cost."""
    clamps = Clamps(config.guard.logit_clamp, config.guard.loss_clamp)
    for text in clamps.check(vocab_size):
        log.write("note", text=text)
    return Mix(config.objectives, clamps=clamps, planned=planned)


def check_sparse(config: Config, teacher: Teacher, mix: Mix) -> None:
    """Refuse what an objective cannot do with a few tokens, before anything is trained."""
    temperature = config.objectives.kd.temperature
    for one in teacher.everyone() if isinstance(teacher, BySource) else (teacher,):
        if one.kind in ("top-k", "sampled") and isinstance(temperature, float):
            mix.check_signal("top-k" if one.kind == "top-k" else "sampled", temperature)
