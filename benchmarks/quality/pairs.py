"""The laboratory's texts for two tokenizers, its models in each, and a run of a student taught across them.

The texts are those of `texts.py`, cut at line ends into pieces of at most 160 bytes. A piece is a row of its own, with
a begin and an end mark, so every tokenizer reads the same bytes with the same context, and bits per byte compare. The
two tokenizers are of different kinds: byte-level BPE, and BPE over characters with byte fallback.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lab
import nets
import numpy as np
import texts
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from stillroom.config.schema import DataConfig
from stillroom.core.types import Batch, DenseSignal, HeadWeights, Needs, PairedSignal
from stillroom.data import Encoder, Record, Rows, Tally, fixed_batches, pack
from stillroom.data.two_tokenizers.align import Coverage
from stillroom.data.two_tokenizers.encode import PairEncoder, TwoTokenizers
from stillroom.models import Student
from stillroom.precision import resolve
from stillroom.teachers import Teacher
from stillroom.teachers.paired import PairedTeacher, matched_tokens
from stillroom.training.evaluate import evaluate

PIECE_BYTES = 160
MAX_LENGTH = PIECE_BYTES + 2
HELD_OUT_PIECES = 480
TRANSFER_PIECES = 256
TOKENIZER_DOCUMENTS = 60  # of each domain, at equal steps
BYTE_LEVEL, SENTENCE_PIECE = "byte-level BPE 2048", "SentencePiece BPE 1024"
TEACHER_STEPS = 2_000
PRETRAINING_STEPS = 300
PRETRAINING_RATE = 1e-2
_SPECIAL = ["<unk>", "<s>", "</s>"]
_EVAL_BATCH = 64


# -- text -------------------------------------------------------------------------------------------------


def _cut(text: str) -> Iterator[str]:
    """Pieces of whole lines; a longer line is cut where it is full. All are within the bound in bytes."""
    held = ""
    for line in text.splitlines(keepends=True):
        if held and len((held + line).encode()) > PIECE_BYTES:
            yield held
            held = ""
        held += line
        while len(held.encode()) > PIECE_BYTES:
            part = held.encode()[:PIECE_BYTES].decode("utf-8", "ignore")
            yield part
            held = held[len(part) :]
    if held:
        yield held


@functools.cache
def pieces(domain: str, side: str) -> tuple[Record, ...]:
    """The pieces of one side. Held-out ones are spread evenly over all held-out documents."""
    found = []
    for document in texts.documents(domain)[side]:
        for number, text in enumerate(_cut(document.text)):
            if text.strip():
                name = f"{document.name}:{number}"
                found.append(Record(name, ((text, True),), name, document.group))
    if side != "train":
        found = [found[number * len(found) // HELD_OUT_PIECES] for number in range(HELD_OUT_PIECES)]
    return tuple(found)


@functools.cache
def transfer_set() -> tuple[Record, ...]:
    """Pieces of Python that the student is taught on, drawn from all of the training text."""
    home = pieces("python", "train")
    order = np.random.default_rng(0).permutation(len(home))[:TRANSFER_PIECES]
    return tuple(home[number] for number in order)


# -- tokenizers -------------------------------------------------------------------------------------------


@functools.cache
def tokenizer(name: str) -> Any:
    folder = texts.CACHE / f"pair-{name.replace(' ', '-')}"
    if not (folder / "tokenizer.json").exists():
        sample = [
            document.text
            for domain in ("python", "cpp")
            for found in (texts.documents(domain)["train"],)
            for document in found[:: max(1, len(found) // TOKENIZER_DOCUMENTS)]
        ]
        raw = _byte_level(sample) if name == BYTE_LEVEL else _sentence_piece(sample)
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        marks = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
        made = PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **marks)
        made.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _byte_level(sample: list[str]) -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(sample, trainer)
    return raw


def _sentence_piece(sample: list[str]) -> Tokenizer:
    """BPE as SentencePiece writes it: a space is U+2581, words hold all spaces before them, bytes for the unseen."""
    words = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" *[^ \\n]+|\\n+| +"), "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
        ]
    )
    seed = Tokenizer(models.BPE())
    seed.pre_tokenizer = words
    seed.train_from_iterator(sample, trainers.BpeTrainer(vocab_size=1024 - 256 - len(_SPECIAL), show_progress=False))
    learned = json.loads(seed.to_str())["model"]
    tokens = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    raw = Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(tokens)},
            [tuple(one) for one in learned["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    raw.pre_tokenizer = words
    raw.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return raw


# -- rows -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sides:
    """What is read with one tokenizer, or by a student with one and its teacher with another."""

    student: str
    teacher: str = ""  # where it is another

    def rows(self, records: tuple[Record, ...]) -> tuple[Rows, Coverage]:
        own, tally = tokenizer(self.student), Tally()
        if not self.teacher:
            return pack(Encoder(own, tally)(records), "rows", MAX_LENGTH, tally), Coverage()
        both = PairEncoder.make(TwoTokenizers(own, tokenizer(self.teacher)), DataConfig(), tally)
        rows = pack(both(records), "rows", MAX_LENGTH, tally)
        return rows, sum(both.covered, Coverage())


@functools.cache
def rows(sides: Sides, domain: str, side: str) -> Rows:
    return sides.rows(transfer_set() if side == "transfer" else pieces(domain, side))[0]


def lessons(sides: Sides) -> lab.Lessons:
    matched = matched_tokens(tokenizer(sides.student), tokenizer(sides.teacher)) if sides.teacher else None
    own = Sides(sides.student)
    size = len(tokenizer(sides.student))
    return lab.Lessons(
        rows(sides, "python", "transfer"), rows(own, "python", "dev"), size, "bits_per_byte", matched=matched
    )


# -- models -----------------------------------------------------------------------------------------------


@functools.cache
def teacher_model(name: str) -> Any:
    """A teacher that reads with this tokenizer, trained on all of the Python text; made on first use."""
    folder = texts.CACHE / f"pair-teacher-{name.replace(' ', '-')}"
    if not (folder / "config.json").exists():
        model = nets.draw(nets.SHAPES["dense"], 1, len(tokenizer(name)), MAX_LENGTH)
        nets.train_teacher(model, [(rows(Sides(name), "python", "train"), texts.BATCH)], TEACHER_STEPS)
        model.save_pretrained(folder)
    return nets.reopened(folder).requires_grad_(False).eval()


@functools.cache
def pretrained(name: str, seed: int) -> Any:
    """A student that reads with this tokenizer and has learned C++ from the labels, as a stranger to Python."""
    folder = texts.CACHE / f"pair-student-{name.replace(' ', '-')}-{seed}"
    if not (folder / "config.json").exists():
        model = nets.draw(nets.STUDENT, seed, len(tokenizer(name)), MAX_LENGTH)
        job = lab.Job(lab.PLAIN, PRETRAINING_RATE, PRETRAINING_STEPS, seed, checks=2)
        own = Sides(name)
        sets = lab.Lessons(rows(own, "cpp", "train"), rows(own, "cpp", "dev"), len(tokenizer(name)), "bits_per_byte")
        lab.train(job, model, None, sets)
        model.save_pretrained(folder)
    return nets.reopened(folder)


class Remembered(Teacher):
    """A teacher whose last hidden states on a set of rows are kept, on its own tokens where those are others."""

    @torch.no_grad()
    def __init__(self, model: Any, known: Rows, *, is_paired: bool) -> None:
        self.kind = "paired" if is_paired else "dense"
        self._is_paired = is_paired
        self._head = HeadWeights(model.get_output_embeddings().weight)
        self._hidden: dict[str, torch.Tensor] = {}
        for begin in range(0, len(known), _EVAL_BATCH):
            batch = self._own(known.batch(range(begin, min(begin + _EVAL_BATCH, len(known)))))
            states = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
            scored = states.reshape(-1, states.shape[-1]).index_select(0, batch.positions)
            counts = torch.bincount(batch.positions // batch.input_ids.shape[1], minlength=len(batch.input_ids))
            self._hidden |= zip(batch.sample_ids, scored.split(counts.tolist()), strict=True)

    def _own(self, batch: Batch) -> Batch:
        if not self._is_paired:
            return batch
        assert batch.other is not None
        return batch.other

    def observe(self, batch: Batch, needs: Needs) -> DenseSignal | PairedSignal:
        hidden = torch.cat([self._hidden[name] for name in batch.sample_ids])
        return (PairedSignal if self._is_paired else DenseSignal)(hidden, self._head)


@functools.cache
def remembered(sides: Sides) -> Remembered:
    known = rows(sides, "python", "transfer")
    return Remembered(teacher_model(sides.teacher or sides.student), known, is_paired=bool(sides.teacher))


class LivePair(PairedTeacher):
    """A teacher that answers at every step, on its own tokens."""

    def __init__(self, name: str) -> None:
        self.model = copy.deepcopy(teacher_model(name))
        super().__init__(nets.live(self.model), tokenizer(name), Coverage())


def bits_per_byte(model: Any, name: str, side: str) -> float:
    held_out = rows(Sides(name), "python", side)
    student = Student(model, vocab_size=len(tokenizer(name)), is_described=True)
    return evaluate(student, fixed_batches(held_out, _EVAL_BATCH), precision=resolve("fp32")).bits_per_byte
