"""Change the student when a run is built: cut it from the teacher, attach an adapter, give it another vocabulary.

The layers of a cut are chosen once and stored in the run's folder: a resumed run must pair its layers with the same
layers of the teacher, and does not choose again.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stillroom.config import Config
from stillroom.config.schema import ShrinkConfig
from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.core.files import write_atomically
from stillroom.core.types import Batch
from stillroom.data import Corpus, fixed_batches, open_data
from stillroom.data.two_tokenizers.align import Pieces, pieces_of
from stillroom.models import LoadedModel, find
from stillroom.models.anatomy import replace_vocabulary, take_marks
from stillroom.models.load import ready_student
from stillroom.models.lora import Adapter, attach, store_base, try_adapter
from stillroom.models.shrink.cut import Cut, cut
from stillroom.models.shrink.layer_choice import CHOICE_TOKENS, Choice, blocks_of, settled_layers
from stillroom.models.shrink.width import CALIBRATION_BATCHES
from stillroom.parallel import Parallel
from stillroom.precision import Precision

_FILE = "cut.json"
_SIZES = ("width", "mlp_width", "heads")


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
    is_chosen = bool(wanted.to) or settled_layers(wanted.layers, num_layers) is None
    choice = _stored(folder, wanted, num_layers, parallel) if is_chosen else None
    batches: Iterable[Batch] = ()
    is_read = bool(wanted.to) or wanted.method != "even"  # text, to choose by
    if wanted.cuts_width or wanted.experts or (choice.sizes if choice is not None else is_chosen and is_read):
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
    tokens_per_batch = config.train.rows_per_batch * min(config.data.max_length, 128)
    return max(CALIBRATION_BATCHES, -(-CHOICE_TOKENS // tokens_per_batch))


# ---- The choice of layers in the run's folder


def _store(folder: Path, choice: Choice, num_layers: int, spent: dict[str, float]) -> None:
    record = {
        "layers": list(choice.layers),
        "of": num_layers,
        "method": choice.method,
        "why": list(choice.why),
        **({"sizes": choice.sizes, "candidates": list(choice.candidates)} if choice.candidates else {}),
        **{name: round(value, 1) for name, value in spent.items()},
    }
    write_atomically(folder / _FILE, json.dumps(record, indent=1).encode("utf-8"))


def _stored(folder: Path | None, wanted: ShrinkConfig, num_layers: int, parallel: Parallel) -> Choice | None:
    """The choice stored by an earlier start of the run, read by the first process; None for a new run."""
    stored = _read(folder, wanted, num_layers) if folder is not None and parallel.is_first else None
    if not parallel.broadcast(float(stored is not None)):
        return None
    own = [] if stored is None else [*stored.layers, *(stored.sizes.get(name, 0) for name in _SIZES)]
    count = int(parallel.broadcast(float(len(own))))
    agreed = [int(parallel.broadcast(float(number))) for number in own or [0] * count]
    layers, sizes = tuple(agreed[: -len(_SIZES)]), dict(zip(_SIZES, agreed[-len(_SIZES) :], strict=True))
    method, why = ("given", ()) if stored is None else (stored.method, stored.why)
    return Choice(layers, method, why, sizes={name: size for name, size in sizes.items() if size})


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
    return _parse(path, num_layers, None if wanted.to else wanted.layers)


def _parse(path: Path, num_layers: int, num_kept: Any = None) -> Choice:
    """Read a choice. `num_kept` None: however many layers it keeps."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        sizes = {name: int(record["sizes"][name]) for name in (_SIZES if "sizes" in record else ())}
        layers = tuple(int(layer) for layer in record["layers"])
        choice = Choice(layers, record["method"], tuple(record["why"]), sizes=sizes)
        is_complete = record["of"] == num_layers and len(choice.layers) == (num_kept or len(choice.layers))
        settled_layers(choice.layers, num_layers)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if not is_complete:
        raise _damaged(path, f"it does not name {num_kept or len(choice.layers)} of {num_layers} layers")
    return choice


def kept_layers(folder: Path, num_layers: int) -> tuple[int, ...]:
    """The layers that the student of a finished run was cut to; all of `num_layers` where none were chosen."""
    if not (folder / _FILE).exists():
        return tuple(range(num_layers))
    return _parse(folder / _FILE, num_layers).layers


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged: {reason}",
        where="student.shrink",
        advice=["restore it from a backup", "or begin again in another folder"],
    )


def _check_alike(choice: Choice, parallel: Parallel) -> None:
    """Raise if the processes chose different layers: each chose for itself, on the same text."""
    if not parallel.same_everywhere(zlib.crc32(json.dumps([choice.layers, choice.sizes]).encode())):
        raise ConfigError(
            f"the processes chose different layers to keep (this one: {list(choice.layers)})",
            where="student.shrink",
            advice=["choose in one process first, and list what it kept: student.shrink.layers = [...]"],
        )


def start_note(
    wanted: ShrinkConfig, perplexity: float, vocab_size: int, teacher_perplexity: float | None = None
) -> str:
    """The perplexity right after the cut. A model that guesses has the size of the vocabulary as its perplexity."""
    compared = "" if teacher_perplexity is None else f" (teacher {teacher_perplexity:,.4g})"
    note = f"right after the cut the student's held-out perplexity is {perplexity:,.4g}{compared}"
    if perplexity <= vocab_size:
        return note
    other = ", or set student.shrink.method = 'loss'" if wanted.method in ("even", "influence") else ""
    return (
        f"{note}: worse than guessing among the {vocab_size:,} tokens of the vocabulary, where a student drawn at "
        f"random starts: keep more of the teacher{other}"
    )


# ---- The adapter of `student.adapter`, and the weights under it

_HALF_WEIGHTS = {
    "fp16-split": "no weight is stored with a residual",
    "fp16-sr": "no weight is rounded stochastically",
}


def adapted(config: Config, loaded: LoadedModel, name: str) -> tuple[LoadedModel, Adapter]:
    """Attach the adapter to the student and freeze everything else."""
    assert config.student.adapter is not None
    base, notes = _base_of(config)
    adapter = attach(loaded.network, config.student.adapter, name=name, base_name=base, seed=config.train.seed)
    notes += try_adapter(adapter, name)
    head = loaded.network.get_output_embeddings()
    is_head_adapted = hasattr(head, "base_layer")
    if is_head_adapted and loaded.is_described:
        notes.append(
            "adapter: the head is adapted, so its own logits are used, which keeps a [tokens, vocabulary] tensor"
        )
    is_described = loaded.is_described and not is_head_adapted
    return replace(loaded, is_described=is_described, notes=(*loaded.notes, *adapter.notes, *notes)), adapter


def _base_of(config: Config) -> tuple[str, list[str]]:
    """What others can load the base from; empty, with a note, where it has no folder."""
    student = config.student
    if student.init == "shrink":
        return "", ["adapter: its base is cut from the teacher and is in no folder: student/ is what can be used alone"]
    source = find(student.model)
    if source.is_adapter:
        return "", [
            f"adapter: {student.model} is an adapter itself, merged; a second one is trained on top of it and student/ "
            "is what can be used alone"
        ]
    if student.init == "random" or not source.has_weights:
        return "", ["adapter: its base is drawn at random and stays so: give a trained student to get a useful one"]
    is_folder = source.is_local and not student.model.startswith("builtin:")
    return str(Path(source.path).resolve()) if is_folder else student.model, []


def check_base(adapter: Adapter, parallel: Parallel) -> None:
    """Raise if the processes have different weights under the adapter: no later comparison looks at them."""
    if not parallel.same_everywhere(int(adapter.base_identity[:15], 16)):
        raise BrokenAtStart(
            "the processes have different weights under the adapter",
            where=adapter.base_name or "student.model",
            advice=["give every process the same model folder and the same libraries"],
        )


def store_frozen(config: Config, adapter: Adapter, precision: Precision) -> list[str]:
    """Store the frozen weights as the precision says, before they move to the device. Return notes for the log."""
    assert config.student.adapter is not None
    dtype = precision.frozen_storage(config.student.adapter.base_dtype)
    num_stored = store_base(adapter.network, dtype, whole=precision.keeps_half_weights)
    num_frozen = sum(part.numel() for part in adapter.network.parameters() if not part.requires_grad)
    word = str(dtype).removeprefix("torch.")
    note = f"adapter: {num_stored:,} of {num_frozen:,} frozen parameters are stored in {word}, the adapter in float32"
    if precision.mode in _HALF_WEIGHTS:
        why = _HALF_WEIGHTS[precision.mode]
        return [note, f"adapter: under {precision.mode} as under fp16-master, because what is trained is FP32: {why}"]
    return [note] if num_stored else []


# ---- The teacher's vocabulary for a loaded student


def check_weights(config: Config) -> None:
    """Raise where the student has no weights whose embeddings could be kept."""
    source = find(config.student.model)
    if config.student.init == "auto" and not source.has_weights:
        raise ConfigError(
            f"student.vocabulary = 'teacher' keeps embeddings that were learned, and {config.student.model} has no "
            "weights",
            where="student.vocabulary",
            advice=["leave student.vocabulary out", "give a student that was trained"],
        )


def take_vocabulary(network: Any, own: Any, teachers: Any) -> list[str]:
    """Change the student's rows from its own tokenizer's to the teacher's, and return notes. `own` None: it had none.

    Equal tables of tokens leave the student as it is.
    """
    if own is None or own.get_vocab() == teachers.get_vocab():
        why = "the student brings no tokenizer" if own is None else "both models have the same tokens"
        return [f"student.vocabulary = 'teacher': {why}, and nothing was changed"]
    before = int(network.get_output_embeddings().weight.shape[0])
    pieces = pieces_of(teachers, own)
    replace_vocabulary(network, pieces.tokens, sorted(set(own.get_vocab().values())))
    take_marks(network, teachers)
    return [surgery_note(pieces, before)]


def surgery_note(pieces: Pieces, rows_before: int) -> str:
    """One line for the log: where the rows of the new vocabulary come from."""
    counts = {
        "copied from a token of the same bytes": pieces.num_copied,
        "copied from the mark of the same role": pieces.num_marks,
        "the mean of several tokens": pieces.num_averaged,
        "the mean of all, as nothing spells them": pieces.num_unspelled,
        "the mean of all, as no token has their id": sum(not one for one in pieces.is_token),
    }
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return (
        f"student.vocabulary = 'teacher': the student's {rows_before:,} rows of embeddings and head became "
        f"{len(pieces.tokens):,} for the teacher's tokens: {told}"
    )
