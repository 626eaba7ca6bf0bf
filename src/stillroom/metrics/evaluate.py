"""Evaluate a model without a run: its scores, size and speed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stillroom.config.schema import DataConfig, TeacherConfig
from stillroom.core.errors import ConfigError, DataError
from stillroom.data import Bos, Corpus, fixed_batches, open_eval, open_held_out
from stillroom.data.sources import refuse_missing
from stillroom.data.two_tokenizers.align import Coverage
from stillroom.metrics.cost import cost_of
from stillroom.metrics.lm_eval import open_tasks
from stillroom.metrics.questions import TextAgreement, answer_questions, read_questions, text_agreement
from stillroom.models import LoadedModel, agree_on_vocabulary, open_teacher
from stillroom.models.anatomy import backbone
from stillroom.models.files import fetch
from stillroom.models.load import model_name
from stillroom.precision import resolve
from stillroom.precision.device import find_device, memory_in_use
from stillroom.teachers import NO_TEACHER, LiveTeacher, Teacher
from stillroom.teachers.paired import PairedTeacher
from stillroom.telemetry.results import retained
from stillroom.training.evaluate import evaluate


@dataclass(frozen=True)
class HeldOut:
    """The text that a run held out: `data.eval`, or its share of the training data, split again by content."""

    settings: DataConfig  # of the run
    documents: int | None = None  # that the run scored, if it is known and rows are as long as there

    @property
    def name(self) -> str:
        return self.settings.eval or ", ".join(source.path for source in self.settings.sources)


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
    disk_megabytes: float | None = None  # these only of models that were given by name
    load_seconds: float | None = None
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    peak_memory_gb: float | None = None
    questions: Mapping[str, Any] | None = None
    tasks: Mapping[str, Any] | None = None
    kl_per_byte: float | None = None  # on spans; these only where the teacher has another tokenizer
    text_agreement: float | None = None  # of greedy continuations, see `stillroom.metrics.questions`
    continued_prompts: int | None = None


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
    retained: Mapping[str, float] | None = None  # of each figure, see `stillroom.telemetry.results`

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
    data: str | HeldOut,
    *,
    teacher: str | None = None,
    max_length: int = 256,
    batch_size: int = 8,
    max_batches: int = 0,
    bos: Bos = "auto",
    device: str = "auto",
    blocks: bool = False,
    questions: Path | None = None,
    tasks: Sequence[str] = (),
) -> dict[str, Any]:
    """Metrics of a model on a text, and of a teacher if given, with size and speed of each.

    The folder of a run means its student. `questions` is a file of questions to answer, `tasks` are lm-eval's.
    """
    benchmarks = open_tasks(tasks)
    asked = read_questions(questions) if questions is not None else []
    if isinstance(data, str):
        refuse_missing(("data", data))  # before the models, which take longer
    where = find_device(device)
    names = {"student": model_name(model), **({"teacher": model_name(teacher)} if teacher is not None else {})}
    opened = {role: _opened(name) for role, name in names.items()}
    result = compare(
        opened["student"][0],
        opened["teacher"][0] if teacher is not None else None,
        data,
        max_length=max_length,
        batch_size=batch_size,
        max_batches=max_batches,
        bos=bos,
        where=where,
        blocks=blocks,
    )
    for role, (loaded, seconds) in opened.items():
        result[role] |= asdict(cost_of(loaded.network, place=_place(names[role]), load_seconds=seconds))
        if asked:
            result[role]["questions"] = asdict(answer_questions(loaded.network, loaded.tokenizer, asked, bos=bos))
        if benchmarks is not None:
            result[role]["tasks"] = benchmarks.run(loaded.network, loaded.tokenizer, batch_size=batch_size)
    if teacher is not None:
        shares = retained(result["student"], result["teacher"])
        is_same = "retention" in result  # otherwise what goes by tokens goes by different ones
        result["retained"] = {name: share for name, share in shares.items() if is_same or name not in _BY_TOKEN}
    return {"model": names["student"], "data": data if isinstance(data, str) else data.name, **result}


def _opened(name: str) -> tuple[LoadedModel, float]:
    began = time.perf_counter()
    return open_model(name), time.perf_counter() - began


def _place(name: str) -> Path:
    return Path(fetch(TeacherConfig(model=name), name, weights=True).path)


def compare(
    student: LoadedModel,
    beside: LoadedModel | None,
    data: str | HeldOut,
    *,
    max_length: int,
    batch_size: int,
    max_batches: int,
    bos: Bos,
    where: torch.device,
    blocks: bool = False,
) -> dict[str, Any]:
    """As `assess`, for loaded models. Moves them to the device.

    A teacher with another vocabulary reads the text in its own tokens; what is compared is then what bytes have.
    """
    has_own = beside is not None and beside.tokenizer.get_vocab() != student.tokenizer.get_vocab()
    theirs = beside.tokenizer if beside is not None and has_own else None
    settings = DataConfig() if isinstance(data, str) else data.settings
    config = settings.model_copy(update={"max_length": max_length, "bos": bos, "min_coverage": 0.0})
    corpus = _held_out(data, student.tokenizer, theirs, config, blocks=blocks)
    source, size = _source(student, beside, corpus.coverage, where)

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
        if has_own:
            _add_agreement(result["student"], text_agreement(student, beside, corpus.evaluation))
        if not has_own:
            result["retention"] = result["teacher"]["perplexity"] / result["student"]["perplexity"]
    gpu, resident, _percent = memory_in_use(where)
    notes = [*corpus.notes, *([_OWN_TOKENS] if has_own else [])]
    if beside is not None and corpus.counters.get("teacher_contexts"):
        notes.append("the teacher is measured on what the student reads, without the context that it has in training")
    return {**result, "gpu_memory_gb": gpu, "memory_gb": resident, "notes": notes}


def _add_agreement(row: dict[str, Any], found: TextAgreement) -> None:
    row |= {"text_agreement": found.agreement, "continued_prompts": found.prompts}
    if found.interval is not None:
        row["intervals"] |= {"text_agreement": list(found.interval)}
    if found.left_out:
        row["notes"].append(f"{found.left_out:,} beginnings of texts were not continued by both models")


def _held_out(data: str | HeldOut, tokenizer: Any, theirs: Any, config: DataConfig, *, blocks: bool) -> Corpus:
    """The text that is scored: record by record, in both tokenizers where there are two, or in blocks."""
    if blocks and theirs is not None:
        raise ConfigError(
            "--blocks cuts texts by the student's tokens, and the teacher reads others",
            where="--blocks",
            advice=["leave --blocks out: texts are then scored one by one", "leave --teacher out"],
        )
    if isinstance(data, str):
        corpus = open_eval(data, tokenizer, config, teacher_tokenizer=theirs)
    else:
        corpus = open_held_out(config, tokenizer, teacher_tokenizer=theirs)
        _check_documents(data, corpus.counters["eval_documents"])
    if not blocks:
        return corpus
    notes = [note for note in corpus.notes if "by itself" not in note]
    notes.append(f"texts are scored end to end, in blocks of {config.max_length:,} tokens that may span several")
    return replace(corpus, evaluation=corpus.evaluation.in_blocks(config.max_length), notes=tuple(notes))


def _check_documents(data: HeldOut, found: int) -> None:
    """Raise if the data was changed: what is held out of it now is not what the run held out."""
    if data.documents is not None and data.documents != found:
        raise DataError(
            f"the run held out {data.documents:,} documents, of the data as it is now {found:,} are: it was changed",
            where=data.name,
            advice=["restore the data", "name a text the run was not trained on: --data FILE"],
        )


def _source(
    student: LoadedModel, beside: LoadedModel | None, coverage: Coverage | None, where: torch.device
) -> tuple[Teacher, int]:
    """The model next to a student as its teacher, and the size of the student's vocabulary, or of the shared one."""
    size = student.anatomy.vocab_rows
    if beside is None:
        return NO_TEACHER, size
    rows = beside.anatomy.vocab_rows
    has_own = coverage is not None
    shared = rows if has_own else agree_on_vocabulary(beside.tokenizer, student.tokenizer, rows, size)
    live = LiveTeacher(beside.network, vocab_size=shared, device=where, offload=False, is_described=beside.is_described)
    return (PairedTeacher(live, beside.tokenizer, coverage), size) if coverage is not None else (live, shared)


_BY_TOKEN = frozenset(
    {
        "perplexity",
        "answer_perplexity",
        "calibration_error",
        "tokens_per_second",
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
    }
)
_OWN_TOKENS = (
    "the models have different tokens: compare bits per byte, KL per byte and the agreement of what they write, as "
    "text; perplexities, calibration and tokens a second count each model's own tokens, and agreement of tokens has no "
    "meaning"
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
