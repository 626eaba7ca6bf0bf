"""Build a run from a configuration: the one place that makes its parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from stillroom.config import Config
from stillroom.core.errors import ConfigError
from stillroom.core.locks import Lock
from stillroom.core.types import BothNeeds
from stillroom.data import Corpus, Loader, open_data, opening_difference
from stillroom.data.chat import prints_day
from stillroom.losses.hidden import InnerObjective
from stillroom.losses.mix import Clamps, Mix, ModelDims, Planned, TokenMatch, plan_objectives, union
from stillroom.models import (
    LoadedModel,
    Student,
    anatomy_of,
    gives_attention,
    has_tokenizer,
    load_tokenizer,
    open_student,
    try_model,
    vocabulary_hash,
)
from stillroom.models.anatomy import layers_if_any
from stillroom.models.compile import CompiledBody, CompiledLayers, what_to_compile
from stillroom.models.lora import Adapter, outline_of
from stillroom.models.routers import has_gates
from stillroom.models.shrink.cut import Cut
from stillroom.models.student import num_positions, packing_error, show_attention
from stillroom.parallel import Parallel
from stillroom.precision import AdamW, ParameterGroup, Precision, bytes_per_parameter, resolve
from stillroom.teachers.base import RunContext, Teacher
from stillroom.teachers.build import (
    TeacherSource,
    build_teacher,
    check_teacher,
    find_source,
    needs_own_tokenizer,
    num_trained_by_teacher,
    open_network,
    shared_vocabulary,
)
from stillroom.telemetry import EventLog
from stillroom.training.checkpoint import CheckpointSnapshots, CheckpointStore, Saves, SnapshotRing, Snapshots
from stillroom.training.faults import make_hooks
from stillroom.training.guard import Guard
from stillroom.training.memory import Copies, copies_of
from stillroom.training.preflight import InputCheck
from stillroom.training.run import Run, held_out_batches
from stillroom.training.schedule import Curriculum, Schedule, steps_of_run, warmup_of_run
from stillroom.training.student import (
    adapted,
    check_base,
    check_weights,
    cut_student,
    store_frozen,
    student_name,
    take_vocabulary,
)

# -- models ----------------------------------------------------------------------------------------
# Load teacher and student, probe them, and check that they share a vocabulary.


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


# -- inner build -----------------------------------------------------------------------------------
# Plan the objectives beside `kd` and `ce` for two loaded models, and check that the models serve them.


def make_objectives(
    config: Config,
    student: Any,
    teacher: Any,
    device: torch.device,
    *,
    kept: Sequence[int] | None = None,
    matched: TokenMatch | None = None,
) -> Planned:
    """Plan the objectives beside `kd` and `ce`, put their projectors on the device, and collect notes for the log."""
    objectives = config.objectives
    notes: list[str] = []
    if objectives.attention.weight != 0.0 and not objectives.attention.attention_layers:
        notes.append("objectives.attention.attention_layers = 0: the attention term is off")
    if set(objectives.weights) == {"kd", "ce"}:
        return Planned((), tuple(notes))
    inside = _inside(student), None if teacher is None else _inside(teacher)
    planned = plan_objectives(objectives, *inside, seed=config.train.seed, kept=kept, matched=matched)
    planned.projectors.to(device)
    for objective in planned.objectives:
        if isinstance(objective, InnerObjective):
            pairs = ", ".join(f"{student_layer} to {teacher_layer}" for student_layer, teacher_layer in objective.pairs)
            notes.append(f"{objective.name}: layers of the student to layers of the teacher, counted from 0: {pairs}")
    num_projected = sum(parameter.numel() for parameter in planned.projectors.parameters())
    if num_projected:
        notes.append(f"projectors of {num_projected:,} parameters are trained beside the student and are no part of it")
    asked = union(objective.asked for objective in planned.objectives)
    if asked.student.attention_layers or asked.teacher.attention_layers:
        notes += _open_attention(asked, student, teacher, config.data.max_length)
    if planned.find("contrastive"):
        notes.append(_contrast_note(config.train.rows_per_batch))
    return Planned(planned.objectives, tuple(notes))


def _inside(model: Any) -> ModelDims:
    anatomy = anatomy_of(model)
    return ModelDims(anatomy.num_layers, anatomy.width)


def _open_attention(asked: BothNeeds, student: Any, teacher: Any, length: int) -> list[str]:
    """Make both models return the attention maps of the asked layers. Raise if one cannot."""
    notes = []
    for role, model, needs in (("student", student, asked.student), ("teacher", teacher, asked.teacher)):
        if not needs.attention_layers:
            continue
        how = show_attention(model)
        if not gives_attention(model, needs.attention_layers):
            raise ConfigError(
                f"the {role} ({anatomy_of(model).family}) does not give its attention maps",
                where="objectives.attention",
                advice=["set objectives.attention.weight = 0", "hidden states serve every model: objectives.layerwise"],
            )
        notes.append(
            f"attention: the {role} {how}; each chosen layer keeps {length:,} x {length:,} numbers a head and row"
        )
    return notes


def _contrast_note(batch_size: int) -> str:
    if batch_size == 1:
        return "contrastive: a micro-batch of one row has nothing to contrast, so the term is 0: raise train.batch_size"
    return (
        f"contrastive: the negatives of a row are the other {batch_size - 1} of its micro-batch, "
        "so this term alone depends on how a window is cut into micro-batches"
    )


# -- compilation -----------------------------------------------------------------------------------
# What of a run is compiled.


def compile_bodies(
    config: Config, models: Models, precision: Precision, num_windows: int, log: EventLog, *, is_sharded: bool = False
) -> tuple[CompiledBody | None, CompiledBody | None]:
    """The compiled bodies of student and teacher, None where one runs as it is. Nothing is compiled yet.

    `num_windows` are those of all processes together. A sharded student is compiled layer by layer.
    """

    def tell(text: str) -> None:
        log.write("note", text=text)

    rows = config.train.rows_per_batch * config.train.gradient_accumulation_steps
    num_tokens = num_windows * rows * config.data.max_length  # an upper bound, by counts alone
    flops = 6.0 * models.loaded_student.anatomy.num_parameters * num_tokens
    chosen = what_to_compile(config.train.compile, precision.device.type, flops)
    if chosen == "off":
        return None, None
    if precision.emulates_half:
        if config.train.compile != "auto":
            tell("compile: off, because FP16 products are emulated on a CPU")
        return None, None
    _keep_compiled_code()
    bodies = []
    teacher = models.loaded_teacher if chosen == "both" else None
    section = config.teacher
    is_plain = section.placement == "device" and section.router.mode == "frozen" and section.quantisation == "none"
    if teacher is not None and not is_plain:
        kinds = "offloaded, streamed, sharded, quantised or whose gates are changed"
        tell(f"compile: a teacher that is {kinds} runs as it is")
        teacher = None
    for role, loaded in (("student", models.loaded_student), ("teacher", teacher)):
        if loaded is not None and not loaded.is_described:
            tell(f"compile: the {role} answers with its own logits and is not compiled")
            loaded = None
        bodies.append(None if loaded is None else _body(loaded.network, role, tell, is_sharded and role == "student"))
    return bodies[0], bodies[1]


def _body(network: Any, role: str, tell: Callable[[str], object], is_sharded: bool) -> CompiledBody:
    if is_sharded and (layers := layers_if_any(network)):
        return CompiledLayers(network, layers, role, tell)
    return CompiledBody(network, role, tell)


def _keep_compiled_code() -> None:
    """Between runs, so that the second one does not compile again. A folder that the user set stays."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(base / "stillroom" / f"inductor-{torch.__version__}")


# -- row checks ------------------------------------------------------------------------------------
# Check that both models can read the rows of a run: their length, and several texts in one.


_TOLERANCE = 1e-3  # in standard deviations of the hidden states, in FP32
_HALF_TOLERANCE = 0.05


def check_rows(models: Models, corpus: Corpus) -> list[str]:
    """Raise `ConfigError` if a model cannot read the rows. Return notes for the log."""
    both = {"student": models.loaded_student, "teacher": models.loaded_teacher}
    loaded = {role: model for role, model in both.items() if model is not None}
    longest = max((int(rows.lengths.max()) for rows in (corpus.train, corpus.evaluation) if len(rows)), default=0)
    others = [int(rows.other_lengths.max()) for rows in (corpus.train, corpus.evaluation) if len(rows.other_lengths)]
    for role, model in loaded.items():
        _check_length(role, model, max(others) if others and role == "teacher" else longest)
    if not corpus.train.is_packed:
        return []
    for role, model in loaded.items():
        check_packing(role, model)
    return ["several records share a training row: attention and positions begin anew with each, which was tried"]


def _check_length(role: str, model: LoadedModel, longest: int) -> None:
    limit = num_positions(model.network)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"a row has {longest:,} tokens, and the {role} ({_name(model)}) has {limit:,} positions",
            where="data.max_length",
            advice=[f"--set data.max_length={limit}", f"use a {role} with more positions"],
        )


def check_packing(role: str, model: LoadedModel) -> None:
    """Raise `ConfigError` if texts of one row change each other's hidden states."""
    error = packing_error(model.network)
    is_wide = model.head.weight.dtype.itemsize >= 4
    if error > (_TOLERANCE if is_wide else _HALF_TOLERANCE):
        raise ConfigError(
            f"the {role} ({_name(model)}) cannot read several texts in one row: they change each "
            f"other's hidden states by {error:.2g} standard deviations",
            where="data.packing",
            advice=["--set data.packing=rows gives each record a row of its own"],
        )


def _name(model: LoadedModel) -> str:
    return type(model.network).__name__


# -- budgets ---------------------------------------------------------------------------------------
# Where snapshots are kept and whether checkpoints are written in the background, by what main memory has room for.


def state_copies(config: Config, mode: str, optimizer: AdamW) -> Copies:
    """The copies of what this optimizer trains. Projectors are FP32 in every mode."""
    trained = []
    for group, cells in optimizer.cells.items():
        is_student = group != "projectors"
        own_mode = mode if is_student and group not in optimizer.fp32_groups else "fp32"
        held = bytes_per_parameter(own_mode, config.precision.moments)
        trained.append((held, sum(cell.parameter.numel() for cell in cells), is_student))
    return copies_of(config, trained)


def make_snapshots(
    config: Config,
    mode: str,
    optimizer: AdamW,
    checkpoints: CheckpointStore,
    log: EventLog,
    parallel: Parallel,
) -> Snapshots:
    """Keep snapshots in memory while they take a modest share of what is free, else use the checkpoints on disk."""
    copies, free = state_copies(config, mode, optimizer), psutil.virtual_memory().available
    if parallel.all_of(copies.leave_room(free, num_copies=parallel.num_copies)):
        return SnapshotRing(config.guard.snapshot_ring)
    log.write(
        "note",
        text=f"{config.guard.snapshot_ring} snapshots would take {copies.kept / 1e9:.1f} GB of {free / 1e9:.1f} GB "
        "free: a rollback returns to the newest checkpoint on disk instead",
    )
    return CheckpointSnapshots(checkpoints)


def make_saves(
    config: Config, mode: str, optimizer: AdamW, snapshots: Snapshots, log: EventLog, parallel: Parallel
) -> Saves:
    """Save in the background where that was asked for, or where memory is ample: not where snapshots have no room."""
    asked = config.checkpoint.background
    copies, free = state_copies(config, mode, optimizer), psutil.virtual_memory().available
    num_savers = parallel.num_copies if parallel.is_sharded else 1  # with ddp one process writes, and only it copies
    has_room = copies.with_saves_leave_room(free, num_copies=parallel.num_copies, num_savers=num_savers)
    is_ample = isinstance(snapshots, SnapshotRing) and parallel.all_of(has_room)
    if asked == "auto" and not is_ample:
        log.write(
            "note",
            text=f"a copy of the state to save takes {num_savers * copies.to_save / 1e9:.1f} GB of {free / 1e9:.1f} GB "
            "free: training waits while a checkpoint is written",
        )
    is_background = asked == "on" or (asked == "auto" and is_ample)
    beside = parallel.beside() if is_background and parallel.is_sharded else None
    return Saves(is_background=is_background, beside=beside)


# -- strategy --------------------------------------------------------------------------------------
# What a run cannot have where its student is sharded, refused by name before anything is trained.


def check_strategy(config: Config, models: Models, precision: Precision, parallel: Parallel) -> None:
    """Raise for the first setting that does not work with `train.strategy = "fsdp"`."""
    if not parallel.is_sharded:
        return
    for where, why, instead in _refused(config, models, precision):
        raise ConfigError(
            f"train.strategy = 'fsdp' does not work with {why}",
            where=where,
            advice=[instead, "or let each process have the whole student: --set train.strategy=ddp"],
        )


def unused_strategy(config: Config, parallel: Parallel) -> list[str]:
    """What to say where a strategy was asked for and there is one process."""
    asked = config.train.strategy
    if asked == "auto" or parallel.size > 1:
        return []
    return [f"train.strategy = {asked!r} has no effect: there is one process, which holds the whole student"]


def _refused(config: Config, models: Models, precision: Precision) -> Iterator[tuple[str, str, str]]:
    """(setting, what it is, what to set instead) of everything that is in the way."""
    if precision.mode in ("fp16-split", "fp16-sr") and config.student.adapter is None:
        yield "precision.mode", f"{precision.mode}: its parts are FP32 masters", "--precision fp16-master"
    if config.train.compile in ("student", "both"):
        if config.student.gradient_checkpointing:
            yield "train.compile", "compiled layers that are computed again in the backward", "--set train.compile=off"
        if not layers_if_any(models.student):
            yield "train.compile", "a compiled student that is not a list of layers", "--set train.compile=off"
    if config.train.batch_size == "auto" and precision.device.type != "cpu":
        yield "train.batch_size", "batch_size = auto: a trial that runs out of memory cannot be taken back", "a number"
    if has_gates(models.student) and not _sends_zeros_for_unused():
        yield "student.model", "a mixture of experts as the student: this torch cannot skip experts", "a newer torch"


def _sends_zeros_for_unused() -> bool:
    """Whether this torch can reduce a layer whose experts were used in one process and not in another."""
    from torch.distributed.fsdp import FSDPModule  # it takes half a second to import

    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


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
    initial_world_size = begun_with or parallel.size
    torch.manual_seed(config.train.seed)
    corpus = open_corpus(config, models, initial_world_size, log)
    if inputs is not None:
        inputs.data(config, corpus)
    loader = make_loader(config, corpus, parallel, initial_world_size)
    precision = make_precision(config, models, device, begun_in)
    adapter = place_student(config, models, precision, parallel, log)
    planned = objectives_of(config, models, device, parallel)
    optimizer = make_optimizer(models.student, precision, config, planned)
    parallel.prepare(optimizer)
    hooks = make_hooks(inject, tell=lambda text: log.write("note", text=text))
    schedule = make_schedule(config, loader.num_batches, initial_world_size)
    student, teacher_body = compiled_student(
        config, models, precision, schedule.num_steps * initial_world_size, parallel, log
    )
    context = make_context(config, student, optimizer, precision, loader, corpus, log, parallel)
    teacher = build_teacher(
        config, models.source, models.loaded_teacher, models.vocab_size, corpus, context, teacher_body
    )
    mix = make_mix(config, models.vocab_size, planned, log)
    check_sparse(config, teacher, mix)
    checkpoints = CheckpointStore(folder / "checkpoints", config.checkpoint.keep, hooks.checkpoint_point)
    snapshots = make_snapshots(config, precision.mode, optimizer, checkpoints, log, parallel)
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
        snapshots=snapshots,
        saves=make_saves(config, precision.mode, optimizer, snapshots, log, parallel),
        hooks=hooks,
        parallel=parallel,
        initial_world_size=initial_world_size,
        lock=lock,
        vocabularies=models.vocabularies,
        adapter=adapter,
        inputs=inputs.found if inputs is not None else {},
    )


def objectives_of(config: Config, models: Models, device: torch.device, parallel: Parallel) -> Planned:
    """The objectives of the loss weights. Attention maps are tried, for which a sharded student is gathered."""
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


def open_corpus(config: Config, models: Models, initial_world_size: int, log: EventLog) -> Corpus:
    """The data, opened unless choosing the models opened it. Log what a user should know about its rows."""
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


# Share of the steps that go from short rows to long ones with data.order = "short_first"; at most the first epoch.
_SHORT_FIRST_SHARE = 0.3


def make_loader(config: Config, corpus: Corpus, parallel: Parallel, initial_world_size: int = 0) -> Loader:
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
    num_steps = make_schedule(config, shuffled.num_batches, initial_world_size or parallel.size).num_steps
    return shuffled.short_first(max(1, round(_SHORT_FIRST_SHARE * num_steps)))


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
