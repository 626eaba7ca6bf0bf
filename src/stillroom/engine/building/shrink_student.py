"""Cut the student from the teacher when a run is built.

The choice of layers is made once and stored in the run's folder: a resumed run must pair its layers with the same
layers of the teacher, and does not choose again.
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
from stillroom.config.schema import ShrinkConfig
from stillroom.data import Corpus, fixed_batches, open_data
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
    keep_data: Callable[[Corpus], None] = lambda _corpus: None,
) -> Cut:
    """Cut the student that the configuration describes and make it ready for training.

    To choose layers or widths, the teacher reads a few fixed batches of the training data; `keep_data` is given what
    was opened for that. `folder` stores the choice of layers.
    """
    wanted, parallel = config.student.shrink, parallel or Parallel()
    num_layers = len(blocks_of(teacher))
    is_chosen = settled_layers(wanted.layers, num_layers) is None
    choice = _stored(folder, wanted, num_layers, parallel) if is_chosen else None
    batches: Iterable[Batch] = ()
    if wanted.cuts_width or (is_chosen and choice is None and wanted.method != "even"):
        corpus = open_data(config.data, tokenizer, tell=tell)
        keep_data(corpus)
        batches = fixed_batches(corpus.train, config.train.rows_per_batch, _num_batches(config))
        teacher.to(device)
    begun, cpu_begun = time.monotonic(), time.process_time()
    result = cut(teacher, wanted, batches, choice=choice, tell=tell if parallel.is_first else lambda _text: None)
    spent = {"seconds": time.monotonic() - begun, "cpu_seconds": time.process_time() - cpu_begun}
    teacher.to("cpu")
    if is_chosen and choice is None:
        _check_alike(result.choice, parallel)
        if folder is not None and parallel.is_first:
            _store(folder, result.choice, num_layers, spent)
    ready_student(result.model, config.student)
    return result


def _num_batches(config: Config) -> int:
    """Enough batches for the widths, and enough tokens for the choice of layers."""
    wanted = config.student.shrink
    tokens_per_batch = config.train.rows_per_batch * min(config.data.max_length, 128)
    return max(wanted.calibration_batches, -(-wanted.choice_tokens // tokens_per_batch))


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
    """The choice stored by an earlier start of the run, read by the first process; None for a new run."""
    stored = _read(folder, wanted, num_layers) if folder is not None and parallel.is_first else None
    if not parallel.broadcast(float(stored is not None)):
        return None
    assert isinstance(wanted.layers, int)
    layers = stored.layers if stored is not None else (0,) * wanted.layers
    agreed = tuple(int(parallel.broadcast(float(layer))) for layer in layers)
    return Choice(agreed, stored.method if stored is not None else "given", stored.why if stored is not None else ())


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
        is_complete = record["of"] == num_layers and len(choice.layers) == wanted.layers
        settled_layers(choice.layers, num_layers)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if not is_complete:
        raise _damaged(path, f"it does not name {wanted.layers} of {num_layers} layers")
    return choice


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged: {reason}",
        where="student.shrink",
        advice=["restore it from a backup", "or begin again in another folder"],
    )


def _check_alike(choice: Choice, parallel: Parallel) -> None:
    """Raise if the processes chose different layers: each chose for itself, on the same text."""
    if not parallel.same_everywhere(zlib.crc32(json.dumps(choice.layers).encode())):
        raise ConfigError(
            f"the processes chose different layers to keep (this one: {list(choice.layers)})",
            where="student.shrink",
            advice=["choose in one process first, and list what it kept: student.shrink.layers = [...]"],
        )


# -- notes for the log ----------------------------------------------------------------------------------------


def start_note(
    wanted: ShrinkConfig, perplexity: float, vocab_size: int, teacher_perplexity: float | None = None
) -> str:
    """The perplexity right after the cut. A model that guesses has the size of the vocabulary as its perplexity."""
    beside = "" if teacher_perplexity is None else f" (teacher {teacher_perplexity:,.4g})"
    note = f"right after the cut the student's held-out perplexity is {perplexity:,.4g}{beside}"
    if perplexity <= vocab_size:
        return note
    other = ", or set student.shrink.method = 'loss'" if wanted.method in ("even", "influence") else ""
    return (
        f"{note}: worse than guessing among the {vocab_size:,} tokens of the vocabulary, where a student drawn at "
        f"random starts: keep more of the teacher{other}"
    )


def student_name(config: Config) -> str:
    """The student's name in log and report; a cut student is named for its teacher."""
    return f"{config.teacher.model} (cut)" if config.student.init == "shrink" else config.student.model
