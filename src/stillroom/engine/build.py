"""From a configuration to a run: every part is made here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from stillroom.checkpoint import CheckpointSnapshots, CheckpointStore, SnapshotRing, Snapshots
from stillroom.config import Config
from stillroom.curriculum import Curriculum
from stillroom.data import Loader, open_data, opening_difference
from stillroom.engine.agree import Agreement
from stillroom.engine.cut import cut_student, student_name, unused_name
from stillroom.engine.inject import make_hooks
from stillroom.engine.inside import make_objectives
from stillroom.engine.run import Run, held_out_batches
from stillroom.errors import BrokenAtStart, ConfigError
from stillroom.files import reason_of
from stillroom.guard import Guard
from stillroom.models import (
    LoadedModel,
    agree_on_vocabulary,
    has_tokenizer,
    load_tokenizer,
    open_student,
    open_teacher,
    tried,
    vocabulary_hash,
)
from stillroom.objectives.clamps import Clamps
from stillroom.objectives.mix import Mix
from stillroom.objectives.objective import Planned
from stillroom.precision import AdamW, ParameterGroup, Precision, resolve
from stillroom.schedule import Schedule, steps_of_run, warmup_of_run
from stillroom.teachers import Surroundings, make_teacher
from stillroom.teachers.make import num_trained_by_teacher, unused_teacher_settings
from stillroom.telemetry import EventLog

_SNAPSHOT_SHARE = 0.4


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

    @property
    def teacher(self) -> Any:
        """The teacher's network, or None."""
        return self.loaded_teacher.network if self.loaded_teacher else None

    @property
    def student(self) -> Any:
        return self.loaded_student.network


def find_device(wanted: str) -> torch.device:
    """The device by name; `auto` takes a GPU where there is one. Accelerate places, and does nothing else."""
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise BrokenAtStart(
            "a CUDA device was asked for and torch sees none",
            where="--device",
            advice=["--device cpu", "check the driver with nvidia-smi, and that torch is a CUDA build"],
        )
    accelerator = Accelerator(cpu=wanted == "cpu", mixed_precision="no")
    if wanted in ("auto", "cpu"):
        device: torch.device = accelerator.device
        return device
    try:
        device = torch.device(wanted)
    except RuntimeError:
        advice = ["cpu, cuda, cuda:1, or auto, which takes a GPU where there is one"]
        raise ConfigError(f"there is no device {wanted!r}", where="--device", advice=advice) from None
    try:
        torch.zeros(1, device=device).tolist()  # `meta` and a card that is not there are told here
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        reason = reason_of(error)
        raise BrokenAtStart(
            f"the device {wanted} cannot be used: {reason}", where="--device", advice=["--device cpu", "--device auto"]
        ) from error
    return device


def load_models(
    config: Config,
    device: torch.device,
    *,
    folder: Path | None = None,
    agree: Agreement | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> Models:
    """Load what the configuration names, try it, and check that the two understand each other.

    `folder` is the run's: a student that is cut from its teacher keeps there which layers it was made of.
    """
    uses_teacher = Curriculum.of(config).uses_teacher
    notes = unused_teacher_settings(config)
    is_cut = config.student.init == "shrink"
    brings_own = not is_cut and has_tokenizer(config.student, config.student.model)
    teacher_tokenizer = None
    if uses_teacher or not brings_own:
        teacher_tokenizer = load_tokenizer(config.teacher, config.teacher.model)
    tokenizer = load_tokenizer(config.student, config.student.model) if brings_own else teacher_tokenizer
    if not brings_own:
        notes.append("the student brings no tokenizer: it takes the teacher's")
    kept = teacher = None
    if uses_teacher or is_cut:
        teacher = open_teacher(config.teacher, teacher_dtype(config, device), teacher_tokenizer)
    if is_cut:
        assert teacher is not None
        found = cut_student(config, teacher.network, tokenizer, device, folder=folder, agree=agree, tell=tell)
        kept = found.kept_layers
        notes += [*unused_name(config.student), *found.notes]
        student = tried(found.model, tokenizer, name=student_name(config), role="student")
        teacher = teacher if uses_teacher else None
    else:
        student = open_student(config.student, tokenizer, seed=config.train.seed)
    size = student.anatomy.vocab_rows
    if teacher is not None:
        size = agree_on_vocabulary(teacher_tokenizer, tokenizer, teacher.anatomy.vocab_rows, size)
        notes += opening_difference(teacher_tokenizer, tokenizer, config.data.bos)
    spoken = {"student": tokenizer, **({"teacher": teacher_tokenizer} if teacher is not None else {})}
    return Models(
        tokenizer,
        teacher,
        student,
        size,
        (*notes, *student.notes, *(teacher.notes if teacher else ())),
        kept,
        {role: vocabulary_hash(table) for role, table in spoken.items()},
    )


def teacher_dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.teacher.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.teacher.dtype)
        return dtype
    return torch.float32 if device.type == "cpu" else torch.float16


def build_run(
    config: Config,
    folder: Path,
    log: EventLog,
    *,
    device: torch.device,
    models: Models,
    inject: str = "",
    agree: Agreement | None = None,
) -> Run:
    """Assemble a run. Nothing is trained here, and nothing is written but the log."""
    agree = agree or Agreement()
    torch.manual_seed(config.train.seed)
    corpus = open_data(config.data, models.tokenizer)
    loader = Loader(
        corpus.train,
        batch_size=config.train.batch_size,
        accumulation=config.train.gradient_accumulation_steps,
        seed=config.train.seed,
        rank=agree.rank,
        num_ranks=agree.size,
    )
    num_parameters = models.loaded_student.anatomy.num_parameters + num_trained_by_teacher(config, models.teacher)
    precision = resolve(config.precision.mode, device, config=config.precision, num_parameters=num_parameters)
    models.student.to(device)
    planned = make_objectives(config, models.student, models.teacher, device, kept=models.kept_layers)
    optimizer = make_optimizer(models.student, precision, config, planned)
    if agree.size > 1:
        optimizer.accumulate_in_fp32()
    hooks = make_hooks(inject, tell=lambda text: log.write("note", text=text))
    student = models.loaded_student.as_student(models.vocab_size)
    surroundings = Surroundings(
        student=student,
        optimizer=optimizer,
        precision=precision,
        learning_rate=config.train.learning_rate,
        window=loader.window,
        held_out=lambda: held_out_batches(config, corpus),
        write=log.write,
    )
    teacher = make_teacher(config, models.loaded_teacher, models.vocab_size, surroundings, num_processes=agree.size)
    clamps = Clamps(config.guard.logit_clamp, config.guard.loss_clamp)
    for text in clamps.check(models.vocab_size):
        log.write("note", text=text)
    mix = Mix(config.objectives, clamps=clamps, planned=planned)
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
        schedule=make_schedule(config, loader.num_batches, agree.size),
        precision=precision,
        optimizer=optimizer,
        guard=Guard(config.guard),
        log=log,
        checkpoints=checkpoints,
        ring=make_snapshots(config, optimizer, models.student, checkpoints, log, agree),
        hooks=hooks,
        agree=agree,
        vocabularies=models.vocabularies,
    )


def make_snapshots(
    config: Config, optimizer: AdamW, student: Any, checkpoints: CheckpointStore, log: EventLog, agree: Agreement
) -> Snapshots:
    """Snapshots in memory while they take a modest share of what is free, else the checkpoints on disk."""
    tensors = [*student.parameters(), *optimizer.tensors().values()]
    needed = config.guard.snapshot_ring * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    free = psutil.virtual_memory().available
    if agree.every(needed * agree.size <= _SNAPSHOT_SHARE * free):
        return SnapshotRing(config.guard.snapshot_ring)
    log.write(
        "note",
        text=f"{config.guard.snapshot_ring} snapshots would take {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB free: "
        "a rollback returns to the newest checkpoint on disk instead",
    )
    return CheckpointSnapshots(checkpoints)


def make_optimizer(student: Any, precision: Precision, config: Config, planned: Planned) -> AdamW:
    train = config.train
    trained = tuple((name, parameter) for name, parameter in student.named_parameters() if parameter.requires_grad)
    groups = [ParameterGroup("student", train.learning_rate, trained)]
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
        num_warmup=warmup_of_run(num_steps, train.warmup_steps, train.warmup_ratio),
        shape=train.schedule,
        floor=train.min_learning_rate_ratio,
    )
