"""Assess a model without a run: its scores, size and speed, and the text it writes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stillroom.config.schema import DataConfig, TeacherConfig
from stillroom.data import Bos, fixed_batches, open_eval, prompt_ids
from stillroom.data.spans.common import Coverage
from stillroom.engine.building.device import find_device
from stillroom.evaluation import evaluate
from stillroom.models import LoadedModel, agree_on_vocabulary, open_teacher
from stillroom.models.anatomy import backbone
from stillroom.models.generate import generate
from stillroom.models.load.names import model_name
from stillroom.precision import resolve
from stillroom.teachers import NO_TEACHER, LiveTeacher, Teacher
from stillroom.teachers.paired import PairedTeacher
from stillroom.telemetry.memory import memory_in_use


@dataclass(frozen=True)
class Scores:
    """A model's scores on held-out text. Comparisons with a teacher are None without one."""

    perplexity: float
    bits_per_byte: float
    kl: float | None
    agreement: float | None
    top5_agreement: float | None
    top5_overlap: float | None
    acceptance: float | None
    calibration_error: float
    intervals: Mapping[str, Sequence[float]]  # 95 %, by name; empty with too few documents
    documents: int
    tokens: int  # scored tokens
    unscored_tokens: int
    uncompared_tokens: int
    parameters: int
    weight_megabytes: float
    tokens_per_second: float
    notes: Sequence[str]
    kl_per_byte: float | None = None  # on spans, where the teacher has a tokenizer of its own


@dataclass(frozen=True)
class Assessment:
    """Scores of a model on held-out text, and of a teacher if one was given."""

    model: str
    data: str
    device: str
    student: Scores  # of the model itself
    teacher: Scores | None
    retention: float | None  # the teacher's perplexity over the model's
    memory_gb: float
    gpu_memory_gb: float
    notes: Sequence[str]

    @property
    def perplexity(self) -> float:
        return self.student.perplexity

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Assessment:
        """From the result of `assess`."""
        teacher = Scores(**result["teacher"]) if "teacher" in result else None
        typed = {"teacher": teacher, "retention": result.get("retention"), "student": Scores(**result["student"])}
        return cls(**{**result, **typed})


def assess(
    model: str,
    data: str,
    *,
    teacher: str | None = None,
    max_length: int = 256,
    batch_size: int = 8,
    max_batches: int = 0,
    bos: Bos = "auto",
    device: str = "auto",
) -> dict[str, Any]:
    """Yardsticks of a model on a text, and of a teacher if given, with size and speed of each.

    The folder of a run means its student.
    """
    where = find_device(device)
    model, teacher = model_name(model), model_name(teacher) if teacher is not None else None
    scores = compare(
        open_model(model),
        None if teacher is None else open_model(teacher),
        data,
        max_length=max_length,
        batch_size=batch_size,
        max_batches=max_batches,
        bos=bos,
        where=where,
    )
    return {"model": model, "data": data, **scores}


def compare(
    student: LoadedModel,
    beside: LoadedModel | None,
    data: str,
    *,
    max_length: int,
    batch_size: int,
    max_batches: int,
    bos: Bos,
    where: torch.device,
) -> dict[str, Any]:
    """As `assess`, for loaded models. Moves them to the device.

    A teacher with another vocabulary reads the text in its own tokens; what is compared is then what bytes have.
    """
    tokenizer = student.tokenizer
    has_own = beside is not None and beside.tokenizer.get_vocab() != tokenizer.get_vocab()
    config = DataConfig(train=data, max_length=max_length, bos=bos, min_coverage=0.0)
    theirs = beside.tokenizer if beside is not None and has_own else None
    corpus = open_eval(data, tokenizer, config, teacher_tokenizer=theirs)
    size = student.anatomy.vocab_rows
    source: Teacher = NO_TEACHER
    if beside is not None:
        rows = beside.anatomy.vocab_rows
        shared = rows if has_own else agree_on_vocabulary(beside.tokenizer, tokenizer, rows, size)
        size = size if has_own else shared
        live = LiveTeacher(
            beside.network, vocab_size=shared, device=where, offload=False, is_described=beside.is_described
        )
        source = PairedTeacher(live, beside.tokenizer, corpus.coverage or Coverage()) if has_own else live

    def measure(loaded: LoadedModel) -> dict[str, Any]:
        loaded.network.to(where)
        batches = list(fixed_batches(corpus.evaluation, batch_size, max_batches))
        reads_own = has_own and loaded is beside
        evaluation = evaluate(
            loaded.as_student(None if reads_own else size),
            [source.own_batch(batch) for batch in batches] if reads_own else batches,
            precision=resolve("fp32", where),
            teacher=None if reads_own or beside is None else source,
        )
        parameters = loaded.anatomy.num_parameters
        return {
            **evaluation.yardsticks(),
            "parameters": parameters,
            "weight_megabytes": parameters * 4 / 1e6,
            "unscored_tokens": evaluation.unscored_tokens,
            "tokens": evaluation.tokens,
            "tokens_per_second": _speed(loaded.network, corpus, batch_size, where, source if reads_own else None),
            "notes": list(loaded.notes),
        }

    result: dict[str, Any] = {"device": str(where), "student": measure(student)}
    if beside is not None:
        result["teacher"] = measure(beside)
        if not has_own:
            result["retention"] = result["teacher"]["perplexity"] / result["student"]["perplexity"]
    gpu, resident, _percent = memory_in_use(where)
    notes = [*corpus.notes, *([_OWN_TOKENS] if has_own else [])]
    return {**result, "gpu_memory_gb": gpu, "memory_gb": resident, "notes": notes}


_OWN_TOKENS = (
    "the models have different tokens: compare bits per byte and KL per byte; perplexities, calibration and tokens a "
    "second are each of its own tokens, and agreement has no meaning"
)


def open_model(name: str) -> LoadedModel:
    return open_teacher(TeacherConfig(model=name), torch.float32)


@torch.no_grad()
def _speed(network: Any, corpus: Any, batch_size: int, device: torch.device, reader: Teacher | None = None) -> float:
    """Tokens a second of a forward pass over a few batches, without the first, which warms up."""
    chosen = fixed_batches(corpus.evaluation, batch_size, 4)
    batches = [(reader.own_batch(batch) if reader else batch).to(device) for batch in chosen]
    tokens, seconds = 0, 0.0
    for number, batch in enumerate(batches):
        began = time.perf_counter()
        backbone(network)(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number or len(batches) == 1:
            tokens += batch.input_ids.numel()
            seconds += time.perf_counter() - began
    return tokens / max(seconds, 1e-9)


def continue_text(
    name: str, prompt: str, *, device: str = "auto", is_raw: bool = False, bos: Bos = "auto", **options: Any
) -> tuple[str, bool]:
    """The model's continuation of a prompt, and whether the chat template was used.

    It is if the tokenizer has one, unless `is_raw`. The folder of a run means its student.
    """
    where = find_device(device)
    model = open_model(model_name(name))
    ids, is_chat = prompt_ids(model.tokenizer, prompt, bos=bos, is_raw=is_raw)
    return str(generate(model.network.to(where), model.tokenizer, ids, **options)), is_chat
