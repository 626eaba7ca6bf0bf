"""A student cut from the teacher when a run is built.

Which layers stay is decided once, when the run begins, and kept in its folder: a resumed run must compare its layers
with the same ones of the teacher, and does not spend the time again.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from stillroom.config import Config
from stillroom.config.schema import ShrinkConfig, StudentConfig
from stillroom.data import fixed_batches, open_data
from stillroom.errors import ConfigError
from stillroom.files import write_atomically
from stillroom.models.load.open import ready_student
from stillroom.models.shrink.bypass import blocks_of
from stillroom.models.shrink.cut import Cut, cut
from stillroom.models.shrink.layer_choice import Choice, settled_layers
from stillroom.parallel import Parallel
from stillroom.types import Batch

_FILE = "cut.json"


def cut_student(
    config: Config,
    teacher: Any,
    tokenizer: Any,
    device: torch.device,
    *,
    folder: Path | None = None,
    parallel: Parallel | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> Cut:
    """The student that the configuration asks to be cut, ready to be trained.

    Where layers or widths are to be chosen, the teacher reads a few batches of the training data: a rerun reads the
    same ones. `folder` is where the choice of layers is kept.
    """
    wanted, parallel = config.student.shrink, parallel or Parallel()
    num_layers = len(blocks_of(teacher))
    is_chosen = settled_layers(wanted.layers, num_layers) is None
    choice = _stored(folder, wanted, num_layers, parallel) if is_chosen else None
    batches: Iterable[Batch] = ()
    if wanted.cuts_width or (is_chosen and choice is None and wanted.method != "even"):
        rows = open_data(config.data, tokenizer).train
        batches = fixed_batches(rows, config.train.rows_per_batch, _num_batches(config))
        teacher.to(device)
    begun, cpu_begun = time.monotonic(), time.process_time()
    found = cut(teacher, wanted, batches, choice=choice, tell=tell if parallel.is_first else lambda _text: None)
    spent = {"seconds": time.monotonic() - begun, "cpu_seconds": time.process_time() - cpu_begun}
    teacher.to("cpu")
    if is_chosen and choice is None:
        _check_alike(found.choice, parallel)
        if folder is not None and parallel.is_first:
            _store(folder, found.choice, num_layers, spent)
    ready_student(found.model, config.student)
    return found


def _num_batches(config: Config) -> int:
    """As many as the widths need, and rows enough for the tokens that layers are chosen by."""
    wanted = config.student.shrink
    a_batch = config.train.rows_per_batch * min(config.data.max_length, 128)
    return max(wanted.calibration_batches, -(-wanted.choice_tokens // a_batch))


# -- the choice in the run's folder ----------------------------------------------------------------------


def _store(folder: Path, choice: Choice, num_layers: int, spent: dict[str, float]) -> None:
    record = {
        "layers": list(choice.layers),
        "of": num_layers,
        "method": choice.method,
        "why": list(choice.why),
        **{name: round(value, 1) for name, value in spent.items()},
    }
    write_atomically(folder / _FILE, json.dumps(record, indent=1).encode("utf-8"))


def _stored(folder: Path | None, wanted: ShrinkConfig, num_layers: int, parallel: Parallel) -> Choice | None:
    """The choice that the run began with, as the first process reads it; None for a run that begins."""
    found = _read(folder, wanted, num_layers) if folder is not None and parallel.is_first else None
    if not parallel.broadcast(float(found is not None)):
        return None
    assert isinstance(wanted.layers, int)
    layers = found.layers if found is not None else (0,) * wanted.layers
    agreed = tuple(int(parallel.broadcast(float(layer))) for layer in layers)
    return Choice(agreed, found.method if found is not None else "given", found.why if found is not None else ())


def _read(folder: Path, wanted: ShrinkConfig, num_layers: int) -> Choice | None:
    path = folder / _FILE
    if not path.exists():
        if any((folder / "checkpoints").glob("*")):
            raise ConfigError(
                f"{path} is missing: it says which layers the student of this run was cut from",
                where="student.shrink",
                advice=["restore it from a backup", "or begin again in another folder"],
            )
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        choice = Choice(tuple(int(layer) for layer in record["layers"]), record["method"], tuple(record["why"]))
        is_whole = record["of"] == num_layers and len(choice.layers) == wanted.layers
        settled_layers(choice.layers, num_layers)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if not is_whole:
        raise _damaged(path, f"it does not speak of {wanted.layers} of {num_layers} layers")
    return choice


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged: {reason}",
        where="student.shrink",
        advice=["restore it from a backup", "or begin again in another folder"],
    )


def _check_alike(choice: Choice, parallel: Parallel) -> None:
    """Each process chose for itself, on the same text: another choice would be another student."""
    if not parallel.same_everywhere(zlib.crc32(json.dumps(choice.layers).encode())):
        raise ConfigError(
            f"the processes chose different layers to keep (this one: {list(choice.layers)})",
            where="student.shrink",
            advice=["choose in one process first, and list what it kept: student.shrink.layers = [...]"],
        )


# -- what is said ----------------------------------------------------------------------------------------


def told_of_start(
    wanted: ShrinkConfig, perplexity: float, vocab_size: int, teacher_perplexity: float | None = None
) -> str:
    """How the student stands right after the cut. A model that knows nothing has the vocabulary as its perplexity."""
    beside = "" if teacher_perplexity is None else f" (teacher {teacher_perplexity:,.4g})"
    told = f"right after the cut the student's held-out perplexity is {perplexity:,.4g}{beside}"
    if perplexity <= vocab_size:
        return told
    other = ", or set student.shrink.method = 'loss'" if wanted.method in ("even", "influence") else ""
    return (
        f"{told}: worse than guessing among the {vocab_size:,} tokens of the vocabulary, where a student drawn at "
        f"random starts: keep more of the teacher{other}"
    )


def student_name(config: Config) -> str:
    """What the student is called in log and report: one that is cut has no name of its own."""
    return f"{config.teacher.model} (cut)" if config.student.init == "shrink" else config.student.model


def unused_name(student: StudentConfig) -> list[str]:
    default = StudentConfig.model_fields["model"].default
    return [] if student.model == default else [f"student.model = {student.model} is not read: the student is cut"]
