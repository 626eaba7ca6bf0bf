"""Load teacher and student, check that both can serve the run, and make them ready to train."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stillroom.config import Config
from stillroom.core.errors import ConfigError
from stillroom.core.types import BothNeeds, Detail
from stillroom.data import Corpus, opening_difference
from stillroom.losses.hidden import InnerObjective
from stillroom.losses.mix import ModelDims, Planned, TokenMatch, plan_objectives, union
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
from stillroom.models.compile import CompiledBody, CompiledLayers
from stillroom.models.load import open_teacher
from stillroom.models.lora import Adapter, outline_of
from stillroom.models.routers import has_gates
from stillroom.models.shrink.cut import Cut
from stillroom.models.student import num_positions, packing_error, show_attention
from stillroom.parallel import Parallel
from stillroom.precision import Precision, choose
from stillroom.precision.device import DeviceFacts, facts_of
from stillroom.teachers.build import (
    TeacherSource,
    check_teacher,
    find_source,
    needs_own_tokenizer,
    open_network,
    shared_vocabulary,
)
from stillroom.telemetry import EventLog
from stillroom.telemetry.events import Stages
from stillroom.training import cpu_rates
from stillroom.training.cpu_rates import answers_in_bf16, shape_of, with_rates
from stillroom.training.student import adapted, check_base, check_weights, cut_student, store_frozen, take_vocabulary


@dataclass(frozen=True)
class Models:
    """Both models, and where the teacher's answers come from."""

    source: TeacherSource
    loaded_teacher: LoadedModel | None  # None when nothing asks for it
    loaded_student: LoadedModel
    vocab_size: int
    notes: tuple[str, ...]
    kept_layers: tuple[int, ...] | None = None  # of the teacher, where the student was cut from it
    corpus: Corpus | None = None  # the run's data, where a cut was chosen on it
    adapter: Adapter | None = None  # in the student
    facts: DeviceFacts | None = None  # of the device, with the rates of a CPU where they were measured

    @property
    def tokenizer(self) -> Any:
        """The student's."""
        return self.source.tokenizer

    @property
    def teacher_tokenizer(self) -> Any:
        """The teacher's where it reads the text in its own tokens, else None."""
        return self.source.own_tokenizer if self.source.is_paired else None

    @property
    def vocabularies(self) -> dict[str, str]:
        """The hash of each model's table of tokens; the teacher's where it answers here or reads its own tokens."""
        hashes = {"student": vocabulary_hash(self.tokenizer)}
        if self.loaded_teacher is not None or self.source.is_served or self.source.is_paired:
            hashes["teacher"] = vocabulary_hash(self.source.own_tokenizer)
        return hashes

    @property
    def teacher(self) -> Any:
        """The teacher's network, or None."""
        if self.source.is_student:
            return self.student
        return self.loaded_teacher.network if self.loaded_teacher else None

    @property
    def student(self) -> Any:
        return self.loaded_student.network


def student_name(config: Config) -> str:
    """Name the student in log and report; a cut student is named for its teacher."""
    return f"{config.teacher.model} (cut)" if config.student.init == "shrink" else config.student.model


# ---- Load both models


def load_models(
    config: Config,
    device: torch.device,
    *,
    folder: Path | None = None,
    parallel: Parallel | None = None,
    tell: Callable[[str], None] = lambda _text: None,
    begun_in: str = "",
    stages: Stages | None = None,
) -> Models:
    """Load and probe both models, and check that they share a vocabulary.

    `folder` is the run's: a student cut from its teacher stores the choice of layers there. `begun_in` is the precision
    of a run that is continued.
    """
    is_cut, stages = config.student.init == "shrink", stages or Stages()
    check_teacher(config, device)
    notes: list[str] = []
    tokenizer, own_tokenizer = _tokenizers(config, notes, asks_teacher=needs_own_tokenizer(config))
    source = find_source(config, device, folder, tokenizer, own_tokenizer)
    if own_tokenizer is None and (is_cut or source.is_loaded or source.is_served):
        own_tokenizer = load_tokenizer(config.teacher, config.teacher.model)
        source = replace(source, own_tokenizer=own_tokenizer)
    kept = corpus = teacher = None
    if is_cut:
        with stages.stage(f"loading and checking {_whole_name(config)}"):
            is_own = config.student.reads_model
            whole = _student_to_cut(config, own_tokenizer) if is_own else open_network(config, source, parallel)
        with stages.stage("cutting the student"):
            cut, corpus = _cut(config, whole.network, tokenizer, device, folder=folder, parallel=parallel, tell=tell)
        teacher = None if is_own else whole
        kept = tuple(config.student.shrink.of_layers[layer] for layer in cut.kept_layers) if is_own else cut.kept_layers
        notes += cut.notes
        student = try_model(cut.model, tokenizer, name=student_name(config), role="student")
    else:
        with stages.stage(f"loading and checking the student {config.student.model}"):
            student = _opened(config, tokenizer)
    adapter = None
    if config.student.adapter is not None:
        student, adapter = adapted(config, student, student_name(config))
    facts = facts_of(device)
    is_bf16, count = False, num_trained(student.network)
    if device.type == "cpu" and count >= cpu_rates.LEAST_PARAMETERS:
        if config.precision.mode == "auto" and not begun_in:
            shape = shape_of(student.network, config.train.rows_per_batch * config.data.max_length)
            facts = with_rates(facts, shape, count, num_processes=parallel.size if parallel else 1)
        mode, _ = choose(config.precision.mode, facts, begun_in=begun_in)
        is_bf16 = answers_in_bf16(config, mode, device.type, count)
    if is_bf16:
        source = find_source(config, device, folder, tokenizer, own_tokenizer, is_bf16=True)
    if source.is_loaded:
        if teacher is None:
            with stages.stage(f"loading and checking the teacher {config.teacher.model}"):
                teacher = open_network(config, source, parallel)
        if is_bf16:
            in_bf16(teacher.network)  # that of a cut student was read in FP32, for the student
    else:
        teacher = None
    size = shared_vocabulary(config, source, teacher, student.anatomy.vocab_rows)
    if (teacher is not None or source.is_served) and not source.is_paired:
        notes += opening_difference(source.own_tokenizer, tokenizer, config.data.bos)
    return Models(
        source,
        teacher,
        student,
        size,
        notes=(*notes, *student.notes, *(teacher.notes if teacher else ())),
        kept_layers=kept,
        corpus=corpus,
        adapter=adapter,
        facts=facts,
    )


def num_trained(student: Any) -> int:
    return sum(parameter.numel() for parameter in student.parameters() if parameter.requires_grad)


def in_bf16(network: Any) -> None:
    """Store the weights in BF16. Buffers stay: a rotary table in BF16 would be off by positions."""
    for weight in network.parameters():
        weight.data = weight.data.to(torch.bfloat16)


def _tokenizers(config: Config, notes: list[str], *, asks_teacher: bool) -> tuple[Any, Any]:
    """Load the student's tokenizer, and the teacher's where that is asked or the student brings none."""
    has_own = not config.student.reads_as_teacher and has_tokenizer(config.student, config.student.model)
    if not has_own and config.teacher.is_student:
        raise ConfigError(
            f"the student {config.student.model} brings no tokenizer, and teacher.model = {config.teacher.model!r} has "
            "no other",
            where="student.model",
            advice=["put the tokenizer's files into the student's folder"],
        )
    teachers = load_tokenizer(config.teacher, config.teacher.model) if asks_teacher or not has_own else None
    if has_own:
        return load_tokenizer(config.student, config.student.model), teachers
    if config.student.vocabulary == "teacher":
        check_weights(config)
    else:
        notes.append(Detail("the student brings no tokenizer: it takes the teacher's"))
    return teachers, teachers


def _opened(config: Config, tokenizer: Any) -> LoadedModel:
    """Open the student from its folder, with the teacher's vocabulary where that is asked for."""

    def change(network: Any) -> list[str]:
        if config.student.vocabulary == "own":
            return []
        has_own = has_tokenizer(config.student, config.student.model)
        own = load_tokenizer(config.student, config.student.model) if has_own else None
        return take_vocabulary(network, own, tokenizer)

    return open_student(config.student, tokenizer, seed=config.train.seed, change=change)


def _whole_name(config: Config) -> str:
    """Name the model that the student is cut from."""
    return (
        f"the student {config.student.model}" if config.student.reads_model else f"the teacher {config.teacher.model}"
    )


def _student_to_cut(config: Config, tokenizer: Any) -> LoadedModel:
    """Load the student of an earlier cut, to be cut again."""
    of_layers = config.student.shrink.of_layers
    section = config.teacher.model_copy(update={"model": config.student.model, "revision": config.student.revision})
    loaded = open_teacher(section, torch.float32, tokenizer)
    if len(of_layers) != loaded.anatomy.num_layers:
        raise ConfigError(
            f"student.shrink.of_layers names {len(of_layers)} layers, and {config.student.model} has "
            f"{loaded.anatomy.num_layers}",
            where="student.shrink.of_layers",
            advice=["name the teacher's layer that each of its layers was, as the cut.json of its run does"],
        )
    return loaded


def _cut(
    config: Config, network: Any, tokenizer: Any, device: torch.device, **options: Any
) -> tuple[Cut, Corpus | None]:
    """Cut the student from the teacher; return the run's data too if that was opened to choose the cut."""
    opened: list[Corpus] = []
    cut = cut_student(config, network, tokenizer, device, keep_data=opened.append, **options)
    return cut, next(iter(opened), None)


# ---- Check that both can read the rows: their length, and several texts in one

_TOLERANCE = 1e-3  # in standard deviations of the hidden states, in FP32
# In half precision rounding grows with the depth: 0.25 to 0.6 in BF16 at 30 layers, where two keys of another text that
# are attended to by mistake make 1.4 to 1.8, and missing borders 11.
_HALF_TOLERANCE, _ROUNDINGS, _MOST_ROUNDING = 0.05, 2.0, 1.25


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
    return [
        Detail("several records share a training row: attention and positions restart with each, which was checked")
    ]


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
    error, rounding = packing_error(model.network)
    is_wide = model.head.weight.dtype.itemsize >= 4
    if error > (_TOLERANCE if is_wide else max(_HALF_TOLERANCE, min(_ROUNDINGS * rounding, _MOST_ROUNDING))):
        raise ConfigError(
            f"the {role} ({_name(model)}) cannot read several texts in one row: they change each "
            f"other's hidden states by {error:.2g} standard deviations",
            where="data.packing",
            advice=["--set data.packing=rows gives each record its own row"],
        )


def _name(model: LoadedModel) -> str:
    return type(model.network).__name__


# ---- Put the student on its device, and refuse what a sharded student cannot have


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
    """Say that a strategy was asked for and there is one process."""
    asked = config.train.strategy
    if asked == "auto" or parallel.size > 1:
        return []
    return [f"train.strategy = {asked!r} has no effect: there is one process, which holds the whole student"]


def _refused(config: Config, models: Models, precision: Precision) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, what it is, what to set instead) of everything that does not work with a sharded student."""
    if precision.mode in ("fp16-split", "fp16-sr") and config.student.adapter is None:
        yield "precision.mode", f"{precision.mode}: its parts are FP32 masters", "--precision fp16-master"
    if config.precision.moments == "int8":
        yield "precision.moments", "int8 moments: blocks would be cut", "--set precision.moments=bfloat16"
    if config.train.optimizer == "muon":
        yield "train.optimizer", "muon: it needs whole matrices", "--set train.optimizer=adamw"
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


# ---- Compile


_WORTH_COMPILING = 1e14  # FLOPs of the student in a run on a CPU: below, compiling takes longer than it saves
# On a GPU: at about 35 ms saved of a step of 1e12 FLOPs (modelled, T4), two minutes of compiling are saved three times.
_WORTH_ON_GPU = 1e16
_LEAST_CAPABILITY = (7, 0)  # of a GPU that inductor serves


def what_to_compile(
    wanted: str, device_type: str, student_flops: float, capability: tuple[int, int] = _LEAST_CAPABILITY
) -> str:
    """`auto` as "off", "student" or "both": by counts alone, so that a resumed run decides alike on any machine."""
    if wanted != "auto":
        return wanted
    if device_type == "cpu":
        return "student" if student_flops >= _WORTH_COMPILING else "off"
    is_served = device_type == "cuda" and capability >= _LEAST_CAPABILITY
    return "both" if is_served and student_flops >= _WORTH_ON_GPU else "off"


def compiled_student(
    config: Config, models: Models, precision: Precision, num_windows: int, parallel: Parallel, log: EventLog
) -> tuple[Student, CompiledBody | None]:
    """Return the student and the teacher's compiled body, None where that runs as it is. Nothing is compiled yet.

    `num_windows` are those of all processes together. A sharded student is compiled layer by layer, and only where
    compiling is asked for by name.
    """

    def tell(text: str) -> None:
        log.write("note", text=text)

    rows = config.train.rows_per_batch * config.train.gradient_accumulation_steps
    num_tokens = num_windows * rows * config.data.max_length  # an upper bound, by counts alone
    flops = 0.0 if parallel.is_sharded else 6.0 * models.loaded_student.anatomy.num_parameters * num_tokens
    device = precision.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else _LEAST_CAPABILITY
    chosen = what_to_compile(config.train.compile, device.type, flops, capability)
    if chosen != "off" and precision.emulates_half:
        chosen = "off"
        if config.train.compile != "auto":
            tell("compile: off, because FP16 products are emulated on a CPU")
    ties = parallel.size == 1
    if chosen == "off":
        return models.loaded_student.as_student(models.vocab_size, ties=ties), None
    _keep_compiled_code()
    bodies: list[CompiledBody | None] = []
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
        is_sharded = parallel.is_sharded and role == "student"
        bodies.append(None if loaded is None else _body(loaded.network, role, tell, is_sharded))
    return models.loaded_student.as_student(models.vocab_size, bodies[0], ties=ties), bodies[1]


def _body(network: Any, role: str, tell: Callable[[str], object], is_sharded: bool) -> CompiledBody:
    if is_sharded and (layers := layers_if_any(network)):
        return CompiledLayers(network, layers, role, tell)
    return CompiledBody(network, role, tell)


def _keep_compiled_code() -> None:
    """Keep compiled code between runs, so that the second one does not compile again. A folder that was set stays."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(base / "stillroom" / f"inductor-{torch.__version__}")


# ---- Plan the objectives next to `kd` and `ce`, and check that the models serve them


def objectives_of(config: Config, models: Models, device: torch.device, parallel: Parallel) -> Planned:
    """Plan the objectives of a run. Attention maps are tried, for which a sharded student is gathered."""
    both = models.student, models.teacher
    with parallel.gathered():
        return make_objectives(config, *both, device, kept=models.kept_layers, matched=models.source.space.matched)


def make_objectives(
    config: Config,
    student: Any,
    teacher: Any,
    device: torch.device,
    *,
    kept: Sequence[int] | None = None,
    matched: TokenMatch | None = None,
) -> Planned:
    """Plan the objectives next to `kd` and `ce`, put their projectors on the device, and collect notes for the log."""
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
        notes.append(f"projectors of {num_projected:,} parameters are trained with the student and are not part of it")
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
