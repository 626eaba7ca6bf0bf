"""Export a model: written beside its place, read back, compared, and only then moved there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stillroom.data.prompts import turn_end_ids
from stillroom.errors import CannotSave, ConfigError, StillroomError
from stillroom.export.card import model_card
from stillroom.export.check import (
    Difference,
    Row,
    choose_rows,
    difference,
    logits_of,
    refuse_changed,
    refuse_rounded,
)
from stillroom.export.source import Source, open_source
from stillroom.files import is_disk_full, reason_of, replaced_folder
from stillroom.models.generate import end_ids
from stillroom.models.length import num_positions
from stillroom.models.load.given import reload
from stillroom.models.load.names import STUDENT
from stillroom.models.load.quiet import quiet_transformers

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


@dataclass
class Job:
    """One export under way. A format's writer fills the folder, reads it back and says how far it is off."""

    source: Source
    form: str
    folder: Path
    rows: list[Row]
    notes: list[str] = field(default_factory=list)

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
) -> Exported:
    """Write a run's student, or any model, to a folder. `form` is a dtype, of GGUF also q8_0."""
    writer, forms = _writer(format)
    form = form or forms[0]
    if form not in forms:
        raise ConfigError(
            f"{format} is not written as {form}", where="--dtype", advice=[f"choose one of {', '.join(forms)}"]
        )
    out = out.expanduser()
    _check_place(out, name, force)
    source = open_source(name)
    rows, compared_on = choose_rows(data, source.texts, source.loaded.tokenizer)
    with _explained(out), quiet_transformers(), replaced_folder(out) as folder:
        job = Job(source, form, folder, rows, list(source.notes))
        change, cost = writer(job)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        done = Exported(
            out, format, form, compared_on, len(rows), change.tokens, change.largest, cost.largest, cost.kl, size,
            tuple(job.notes),
        )  # fmt: skip
        (folder / "README.md").write_text(_card(source, done, folder), encoding="utf-8")
    return done


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
    raise ConfigError(f"{format} is no format", where="--format", advice=["choose one of hf, gguf, onnx"])


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
    """Turn errors of the writers, of which each library has its own, into one of ours."""
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
