"""Export a model: written next to its place, read back, compared, and only then moved there."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stillroom.builtin import own_text, topics
from stillroom.config.schema import DataConfig, TeacherConfig
from stillroom.core.errors import CannotSave, ConfigError, DataError, StillroomError
from stillroom.core.files import is_disk_full, is_url, reason_of, replaced_folder
from stillroom.data import fixed_rows, open_eval, opening_ids
from stillroom.data.chat import turn_end_ids
from stillroom.export.card import Origin, model_card
from stillroom.models import LoadedModel, open_teacher
from stillroom.models.generate import end_ids
from stillroom.models.load import STUDENT, model_name, quiet_transformers, run_of
from stillroom.models.objects import reload
from stillroom.models.student import num_positions
from stillroom.telemetry.record import Evaluated, LoggedRun, read_evaluation
from stillroom.telemetry.wording import as_number, section

# -- source ----------------------------------------------------------------------------------------
# What is exported: the student of a run, or any model, with what is known about it.


@dataclass(frozen=True)
class Source:
    """A model in FP32, its name, and the records of the run that made it."""

    name: str
    loaded: LoadedModel
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    evaluated: Evaluated = field(default_factory=Evaluated)
    origin: Origin | None = None  # of the student's weights; None where no run is known
    notes: Sequence[str] = ()

    @property
    def texts(self) -> list[str]:
        """The run's held-out and training data, as far as they are files."""
        data = self.config.get("data") or {}
        train = data.get("train") or []
        paths = [train] if isinstance(train, str) else [source.get("path") for source in train]
        return [path for path in (data.get("eval"), *paths) if isinstance(path, str) and path]


def open_source(name: str) -> Source:
    """Load the model of a run's folder, a model's folder, a hub id or a builtin name."""
    model = model_name(name)
    loaded = open_teacher(TeacherConfig(model=model), torch.float32)
    if getattr(loaded.network, "is_quantized", False):
        raise ConfigError(
            f"the weights of {name} are quantised: they cannot be written in another form",
            advice=["export the model as it was before it was quantised"],
        )
    folder = run_of(name)
    if folder is None:
        return Source(name, loaded, notes=loaded.notes)
    records = run_records(folder, num_layers=loaded.anatomy.num_layers)
    return Source(name, loaded, **{**records, "notes": (*loaded.notes, *records["notes"])})


def run_records(folder: Path, *, num_layers: int | None = None) -> dict[str, Any]:
    """What the folder of a run tells of its student, for the model card. `num_layers` are those of the student."""
    record, notes = read_table(folder / "config.json"), list[str]()
    evaluated = read_evaluation(folder, notes)
    if evaluated.doubt:
        notes.append("the model card is without the figures of `stillroom eval`: the student has changed since then")
    config = _mapping(record, "config")
    of = as_number(section(LoggedRun.load(folder).start, "teacher").get("layers"))
    layers = (num_layers, int(of)) if num_layers and of else None
    return {
        "config": config,
        "versions": _mapping(record, "versions"),
        "summary": read_table(folder / "summary.json"),
        "evaluated": evaluated,
        "origin": Origin.of(config, local=_mapping(record, "paths").keys(), layers=layers),
        "notes": notes,
    }


def read_table(path: Path) -> dict[str, Any]:
    """A JSON object; empty if it is not there or not whole: the model card then says less."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


# -- check -----------------------------------------------------------------------------------------
# Compare what was written with what it was written from, by logits on real text.
#
# Two differences are told apart. What the form itself costs: weights in half precision or eight bits give other
# answers. And what should be nothing: the file read back must give the logits of the very weights that it is meant to
# hold.
#
# # L positions of a row, V vocabulary


NUM_ROWS, LENGTH = 4, 64
_TEXT = (16, 256)  # rows and their length, for what a quantised file loses
_MAX_RECORDS = 32
# Mean KL in nats. The largest difference of a logit is not a measure here: a router that chooses another expert at one
# position moves it far.
_ROUNDED = {"float32": 1e-6, "float16": 0.01, "bfloat16": 0.1, "q8_0": 0.1}
_ROUNDED_BLOCKS = 2.0  # of fewer bits: what is lost is told, and only a model that is broken by it is refused

Row = list[int]


@dataclass(frozen=True)
class Difference:
    """How far logits differ from expected ones."""

    largest: float
    kl: float  # mean over positions, of the expected distribution from the other
    tokens: int


def rows_of(spec: str, tokenizer: Any, count: int = NUM_ROWS, length: int = LENGTH) -> list[Row]:
    """A few rows of a text that was named."""
    config = DataConfig(train=spec, max_length=length, max_records=_MAX_RECORDS)
    rows = open_eval(spec, tokenizer, config).evaluation
    return [rows.row(int(index)).tolist()[:length] for index in fixed_rows(rows, count, 1)]


def own_rows(tokenizer: Any, count: int = NUM_ROWS, length: int = LENGTH) -> list[Row]:
    """A few rows of the text that every Python brings."""
    documents = list(topics()) or list(own_text())
    chosen = documents[:: max(1, len(documents) // count)][:count]
    opening = list(opening_ids(tokenizer, "auto"))
    texts = tokenizer([document.text[: 16 * length] for document in chosen], add_special_tokens=False)["input_ids"]
    return [[*opening, *ids][:length] for ids in texts]


def choose_rows(
    named: str | None, of_run: Sequence[str], tokenizer: Any, count: int = NUM_ROWS, length: int = LENGTH
) -> tuple[list[Row], str]:
    """Rows to compare on, and where they are from: the named text, else the run's own, else Python's."""
    if named is not None:
        return rows_of(named, tokenizer, count, length), named
    for spec in of_run:
        if spec.startswith(("builtin:", "hf:")) or is_url(spec):
            continue  # the first is read as below; others are fetched only where the user names them
        try:
            rows = rows_of(spec, tokenizer, count, length)
        except (DataError, ConfigError):  # moved or gone since: any text will do
            continue
        if rows:
            return rows, spec
    return own_rows(tokenizer, count, length), "the reference pages of this Python"


@torch.no_grad()
def logits_of(network: Any, rows: Sequence[Row]) -> list[Tensor]:
    """The logits of each row, on the CPU and in FP32. [L, V] each"""
    device = next(network.parameters()).device
    answers = [network(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0] for row in rows]
    return [logits.float().cpu() for logits in answers]


@dataclass(frozen=True)
class Quality:
    """What a quantised model lost, on a text: perplexities, and mean KL of the full from the quantised model."""

    tokens: int
    full_perplexity: float
    perplexity: float
    kl: float


@torch.no_grad()
def quality_of(full: Any, quantised: Any, rows: Sequence[Row]) -> Quality:
    """Compare two networks on rows of text, one row at a time: a vocabulary of logits is not kept."""
    losses, kl, count = [0.0, 0.0], 0.0, 0
    for row in rows:
        if len(row) < 2:
            continue
        targets = torch.tensor(row[1:])[:, None]
        both = [torch.log_softmax(logits_of(network, [row])[0][:-1].double(), -1) for network in (full, quantised)]
        for number, log_probs in enumerate(both):
            losses[number] -= float(log_probs.gather(1, targets).sum())
        kl += float(_kl(both[0], both[1]).sum())
        count += len(targets)
    if not count:
        raise ConfigError("the text to compare on has no row of two tokens", where="--data", advice=["name another"])
    before, after = (math.exp(min(loss / count, 700.0)) for loss in losses)
    return Quality(count, before, after, kl / count)


def difference(expected: Sequence[Tensor], given: Sequence[Tensor]) -> Difference:
    """How far the given logits differ. A value that is not finite is an infinite difference."""
    wanted, found = torch.cat(list(expected)).double(), torch.cat(list(given)).double()
    size = min(wanted.shape[1], found.shape[1])  # a format may leave out padding of the head, or add it
    wanted, found = wanted[:, :size], found[:, :size]
    apart = (wanted - found).abs().max()
    largest = float(apart) if bool(torch.isfinite(apart)) else math.inf
    kl = float(_kl(torch.log_softmax(wanted, -1), torch.log_softmax(found, -1)).mean())
    return Difference(largest, kl if math.isfinite(kl) else math.inf, len(wanted))


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p, q) of each row as a sum of terms that are not negative. [L, V] -> [L]

    The terms of sum p d, d = log p - log q, have both signs and the size of d, and cancel to about d^2 / 2: of nearly
    equal distributions rounding remains, which may be below zero. Both sum to 1, so sum p (d + e^-d - 1) is the same
    number, and e^-d - 1 >= -d.
    """
    apart = log_p - log_q
    return (log_p.exp() * (apart + torch.expm1(-apart))).sum(-1)


def refuse_rounded(form: str, cost: Difference) -> None:
    """Refuse a form that changes the model too much."""
    bound = _ROUNDED.get(form, _ROUNDED_BLOCKS)
    if cost.kl <= bound and math.isfinite(cost.largest):
        return
    raise CannotSave(
        f"in {form} the model answers differently: mean KL {cost.kl:.3g} (bound {bound:g}), largest difference of a "
        f"logit {cost.largest:.3g}; nothing was written",
        advice=["export in float32", "bfloat16 has the range of float32 where float16 overflows"],
    )


def refuse_changed(what: str, change: Difference, bound: float) -> None:
    """Refuse a file whose logits, read back, are not those of the weights it is meant to hold."""
    if change.largest <= bound:
        return
    raise CannotSave(
        f"{what}, read back, gives other logits: the largest difference is {change.largest:.3g} (bound {bound:g}); "
        "nothing was written",
        advice=["try --format hf", "if that works, this architecture is not written correctly: please report it"],
    )


Format = Literal["hf", "gguf", "onnx"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EXACT = 1e-5  # of logits of a folder that was read back
_OURS = ("config.json", "*.gguf", "*.onnx")  # one of these is in every export


@dataclass(frozen=True)
class Exported:
    """What was written, and how far it is from what it was written from."""

    folder: Path
    format: Format
    form: str  # dtype or kind of quantisation
    compared_on: str
    rows: int
    tokens: int
    largest: float  # difference of logits, read back against the weights that were meant
    rounded_largest: float  # difference of logits, in this form against FP32
    rounded_kl: float
    bytes: int
    notes: Sequence[str] = ()
    quality: Quality | None = None  # of a quantised file
    weights: Mapping[str, int] = field(default_factory=dict)  # how many are stored in which format
    tokens_per_second: float | None = None  # written by llama.cpp, where its library is installed


@dataclass
class Job:
    """One export under way. A format's writer fills the folder, reads it back and says how far it is off."""

    source: Source
    form: str
    folder: Path
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    text: list[Row] = field(default_factory=list)  # longer: for what a quantised file loses
    layers: Mapping[str, str] = field(default_factory=dict)  # formats of single layers
    quality: Quality | None = None
    kinds: dict[str, int] = field(default_factory=dict)

    @property
    def network(self) -> Any:
        return self.source.loaded.network

    @property
    def tokenizer(self) -> Any:
        return self.source.loaded.tokenizer

    def rounded(self, round_: Callable[[str, Tensor], Tensor]) -> tuple[list[Tensor], Difference]:
        """Round the network's weights in place; its logits then, and what rounding changed. Refuse too much of it."""
        exact = logits_of(self.network, self.rows)
        with torch.no_grad():
            for name, weight in self.network.named_parameters():
                weight.copy_(round_(name, weight))
        logits = logits_of(self.network, self.rows)
        cost = difference(exact, logits)
        refuse_rounded(self.form, cost)
        return logits, cost


Writer = Callable[[Job], tuple[Difference, Difference]]


def export(
    name: str,
    out: Path,
    *,
    format: Format = "hf",
    form: str | None = None,
    data: str | None = None,
    force: bool = False,
    layers: Mapping[str, str] | None = None,
) -> Exported:
    """Write a run's student, or any model, to a folder. `form` is a dtype, of GGUF also a block format such as q4_0.

    `layers` are exceptions of a quantised file: a format for each pattern of parameter names. A student that was
    trained with `student.quantise` has those of its run.
    """
    writer, forms = _writer(format)
    form = form or forms[0]
    if form not in forms:
        raise ConfigError(
            f"{format} is not written as {form}",
            where="--quantise" if format == "gguf" else "--dtype",
            advice=[f"choose one of {', '.join(forms)}"],
        )
    out = out.expanduser()
    _check_place(out, name, force)
    source = open_source(name)
    rows, compared_on = choose_rows(data, source.texts, source.loaded.tokenizer)
    is_quantised = form not in DTYPES
    text = choose_rows(data, source.texts, source.loaded.tokenizer, *_TEXT)[0] if is_quantised else []
    if layers is None and is_quantised:
        layers = _trained_layers(source, form)
    with _explained(out), quiet_transformers(), replaced_folder(out) as folder:
        job = Job(source, form, folder, rows, list(source.notes), text, layers or {})
        change, cost = writer(job)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        done = Exported(
            out, format, form, compared_on, len(rows), change.tokens, change.largest, cost.largest, cost.kl, size,
            tuple(job.notes), job.quality, job.kinds, llama_cpp_speed(folder) if is_quantised else None,
        )  # fmt: skip
        (folder / "README.md").write_text(_card(source, done, folder), encoding="utf-8")
    return done


def _trained_layers(source: Source, form: str) -> Mapping[str, str]:
    """The exceptions that the run of this student was trained with, where it was trained for this form."""
    student = _mapping(source.config, "student")
    return _mapping(student, "quantise_layers") if student.get("quantise") == form else {}


def llama_cpp_speed(folder: Path) -> float | None:
    """Tokens a second that llama.cpp writes with the file, on one thread; None where xllamacpp is not installed.

    In a separate process: a file that llama.cpp cannot load may end the process.
    """
    path = next(iter(sorted(folder.glob("*.gguf"))), None)
    if path is None or importlib.util.find_spec("xllamacpp") is None:
        return None
    done = subprocess.run([sys.executable, "-c", _SPEED, str(path)], capture_output=True, text=True, timeout=600)
    try:
        return float(done.stdout.split()[-1])
    except (IndexError, ValueError):
        raise CannotSave(
            "llama.cpp cannot run the file that was written",
            where=path.name,
            advice=["try --format hf", "please report it with this line: " + " ".join(done.stderr.split())[-200:]],
        ) from None


_SPEED = """
import sys, xllamacpp
options = xllamacpp.CommonParams()
options.model.path = sys.argv[1]
options.n_ctx, options.n_parallel, options.warmup, options.cpuparams.n_threads = 256, 1, False, 1
asked = {"prompt": "The", "n_predict": 64, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
print(xllamacpp.Server(options).handle_completions(asked)["timings"]["predicted_per_second"])
"""


def _writer(format: Format) -> tuple[Writer, tuple[str, ...]]:
    """The writer of a format and the forms it takes, the usual one first."""
    match format:
        case "hf":
            return write_folder, tuple(DTYPES)
        case "gguf":
            from stillroom.export import gguf

            return gguf.write, gguf.FORMS
        case "onnx":
            from stillroom.export import onnx

            return onnx.write, onnx.FORMS
    raise ConfigError(f"unknown format {format}", where="--format", advice=["choose one of hf, gguf, onnx"])


def write_folder(job: Job) -> tuple[Difference, Difference]:
    """A Hugging Face folder: weights, configuration, tokenizer, chat template and generation settings."""
    dtype = DTYPES[job.form]
    network, tokenizer = job.network, job.tokenizer
    expected, cost = job.rounded(lambda _name, weight: weight.to(dtype).to(weight.dtype))
    with torch.no_grad():
        for weight in network.parameters():  # not buffers: rotary tables stay exact and are not saved
            weight.data = weight.data.to(dtype)
    _finish_settings(network, tokenizer)
    network.save_pretrained(job.folder)
    tokenizer.save_pretrained(job.folder)
    again, _tokenizer = reload(job.folder)
    change = difference(expected, logits_of(again, job.rows))
    refuse_changed("the folder", change, EXACT)
    return change, cost


def _finish_settings(network: Any, tokenizer: Any) -> None:
    """Settings for use, not for training: the cache is on, and generation ends where a turn ends."""
    network.config.use_cache = True
    settings = network.generation_config
    settings.use_cache = True
    ends = sorted({*end_ids(network, tokenizer), *turn_end_ids(tokenizer)})
    settings.eos_token_id = (ends[0] if len(ends) == 1 else ends) if ends else settings.eos_token_id
    for name in ("bos_token_id", "pad_token_id"):
        if getattr(settings, name) is None:
            setattr(settings, name, getattr(tokenizer, name, None))


def _card(source: Source, done: Exported, folder: Path) -> str:
    network = source.loaded.network
    checked = [
        f"read back and compared on {done.rows} rows ({done.tokens} tokens) of {Path(done.compared_on).name}: the "
        f"largest difference of a logit is {done.largest:.2g}",
    ]
    if done.form != "float32":
        checked.append(
            f"{done.form} against float32: the largest difference of a logit is {done.rounded_largest:.2g}, the mean "
            f"KL {done.rounded_kl:.2g}"
        )
    if done.quality is not None:
        lost, total = done.quality, sum(done.weights.values())
        shares = ", ".join(f"{kind} {100 * count / total:.1f} %" for kind, count in done.weights.items())
        checked.append(
            f"quantised: perplexity {lost.perplexity:.2f} ({lost.full_perplexity:.2f} before), mean KL {lost.kl:.3g} "
            f"on {lost.tokens:,} tokens of {Path(done.compared_on).name}; weights: {shares}"
        )
    if done.tokens_per_second is not None:
        checked.append(f"llama.cpp writes {done.tokens_per_second:.0f} tokens a second with it on one thread")
    return model_card(
        title=done.folder.name,
        config=source.config,
        summary=source.summary,
        versions=source.versions,
        evaluated=source.evaluated,
        origin=source.origin,
        model={
            "format": done.format,
            "file": next((path.name for path in sorted(folder.glob("*.gguf"))), None),
            "has_chat": bool(getattr(source.loaded.tokenizer, "chat_template", None)),
            "family": network.config.model_type,
            "parameters": source.loaded.anatomy.num_parameters,
            "dtype": done.form,
            "bytes": done.bytes,
            "positions": num_positions(network),
        },
        checked=checked,
    )


def _check_place(out: Path, name: str, force: bool) -> None:
    """Refuse a place that holds something, unless it is an earlier export and `force`."""
    here, there = out.resolve(), Path(name).expanduser().resolve()
    if there.exists() and (here in (there, there / STUDENT) or here in there.parents):
        raise ConfigError(f"--out {out} would replace what is exported", where="--out", advice=["name another folder"])
    try:
        if out.exists() and not out.is_dir():
            raise ConfigError(f"--out {out} is a file", where="--out", advice=["name a folder"])
        if out.is_dir() and any(out.iterdir()):
            is_export = any(any(out.glob(pattern)) for pattern in _OURS)
            if not force:
                advice = ["name another folder"] + (["--force replaces the export that is there"] if is_export else [])
                raise ConfigError(f"--out {out} is not empty", where="--out", advice=advice)
            if not is_export:
                raise ConfigError(
                    f"--out {out} holds other things than an export, which --force would remove",
                    where="--out",
                    advice=["name another folder", "remove it yourself if nothing in it is needed"],
                )
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotSave(f"cannot write to {out}: {reason_of(error)}", where="--out") from error


@contextlib.contextmanager
def _explained(out: Path) -> Iterator[None]:
    """Turn errors of the writers, of which each library has its own, into a StillroomError."""
    try:
        yield
    except (StillroomError, MemoryError):
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not is_disk_full(error):
            raise
        raise CannotSave(
            f"cannot write {out}: {reason_of(error)}", where=str(out), advice=["free some space on that disk"]
        ) from error
