"""Sparse answers against the teacher's whole distribution: what a student loses, and what a position costs on disk.

python benchmarks/quality/bench_sparse.py

Every arm trains by forward KL at temperature 1 on the same rows in the same order, with its own learning rate. Angles
are those between the gradient of an arm and that of the whole distribution, over 64 batches of a student that was
trained for 200 steps: the mean over batches of one, and the angle of the sums, where noise cancels and bias stays.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import book as books
import lab
import nets
import standard
import texts
import torch
from book import Book

from stillroom.core.types import Batch, Needs, Signal
from stillroom.data import Loader
from stillroom.losses.mix import Mix
from stillroom.models import Student
from stillroom.precision import resolve
from stillroom.teachers import Teacher
from stillroom.teachers.cache.manifest import Manifest
from stillroom.teachers.cache.reader import Cache
from stillroom.teachers.cache.writer import commit_shard, needed_rows, open_store, pack_shard, plan_shards
from stillroom.teachers.signals import RowAnswer, SignalSpec, reduce_row, signal_of
from stillroom.training.schedule import Curriculum

FULL = "whole distribution"
_ANGLE_BATCHES = 64
_ANGLE_STEPS = 200
_SIZE_ROWS = 512


@dataclass(frozen=True)
class Arm:
    spec: SignalSpec
    objectives: Mapping[str, Any] = field(default_factory=lambda: {"kd.weight": 1.0})


ARMS = {
    "hybrid 8 + 12 (default)": Arm(SignalSpec("hybrid", 8, 12)),
    "hybrid 4 + 12": Arm(SignalSpec("hybrid", 4, 12)),
    "sampled 50": Arm(SignalSpec("sampled", 0, 50)),
    "top-16 + tail": Arm(SignalSpec("top_k", 16, 0)),
    "top-16 + tail, rest to the label": Arm(
        SignalSpec("top_k", 16, 0), {"kd.weight": 1.0, "kd.on_wrong_teacher": "label_residual"}
    ),
    "top-16 renormalised": Arm(SignalSpec("renormalised", 16, 0)),
    "top-64 renormalised": Arm(SignalSpec("renormalised", 64, 0)),
}


class Reduced(Teacher):
    """The remembered teacher through a sparse signal. Each row is reduced once."""

    def __init__(self, whole: Teacher, spec: SignalSpec) -> None:
        self.kind = "sampled" if spec.is_sampled else "top-k"
        self.spec = spec.within(texts.VOCAB)
        self.rows: dict[str, RowAnswer] = {}
        self._whole = whole

    def observe(self, batch: Batch, needs: Needs) -> Signal:
        if any(key not in self.rows for key in batch.keys):
            self._reduce(batch, needs)
        return signal_of(RowAnswer.join([self.rows[key] for key in batch.keys]), self.spec)

    def _reduce(self, batch: Batch, needs: Needs) -> None:
        dense = self._whole.observe(batch, needs)
        counts = torch.bincount(batch.positions // batch.targets.shape[1], minlength=len(batch.keys)).tolist()
        parts = zip(batch.keys, dense.hidden.split(counts), batch.scored_targets.split(counts), strict=True)
        for key, hidden, targets in parts:
            self.rows[key] = reduce_row(hidden, dense.head, targets, self.spec, key)


def whole_teacher() -> Teacher:
    return nets.remembered(standard.job({}, 1e-2, 0).teacher, "python", standard.TOKENS)


def sweep(book: Book) -> None:
    standard.tune(book, FULL, {"kd.weight": 1.0})
    for name, arm in ARMS.items():
        source = Reduced(whole_teacher(), arm.spec)
        book.tuned(
            name,
            lambda rate, seed, arm=arm: standard.job(arm.objectives, rate, seed),
            work=lambda job, source=source: lab.run(job, source=source),
            signal=arm.spec.to_dict(),
        )
        book.fact(f"bytes {name}", lambda source=source: size_of(source))
    for name, arm in ARMS.items():
        book.fact(f"angle {name}", lambda arm=arm: angle_of(arm))


# -- bytes -----------------------------------------------------------------------------------------------


def size_of(source: Reduced) -> dict[str, float]:
    """Bytes of a shard's file for each scored position in it, index and checksums included."""
    rows = texts.transfer_set("python", standard.TOKENS)
    chosen = list(range(0, len(rows), max(1, len(rows) // _SIZE_ROWS)))[:_SIZE_ROWS]
    for start in range(0, len(chosen), texts.BATCH):
        source.observe(rows.batch(chosen[start : start + texts.BATCH]), Needs())
    needed = needed_rows([(rows, chosen)])
    answers = {row.key: source.rows[row.key] for row in needed}
    (plan,) = plan_shards(needed, 1 << 40)
    manifest = Manifest(source.spec, texts.VOCAB, "", {})
    with tempfile.TemporaryDirectory() as folder:
        open_store(Path(folder), manifest)
        commit_shard(Path(folder), plan, pack_shard(answers, manifest))
        num_bytes = Cache(Path(folder)).num_bytes
    positions = sum(answer.num_positions for answer in answers.values())
    return {"bytes_per_position": num_bytes / positions, "positions": positions, "vocabulary": texts.VOCAB}


# -- angles ----------------------------------------------------------------------------------------------


def angle_of(arm: Arm) -> dict[str, float]:
    """Cosine to the whole distribution's gradient: mean over batches, and of the sums over all batches."""
    model = _briefly_trained()
    source, whole = Reduced(whole_teacher(), arm.spec), whole_teacher()
    loader = Loader(texts.transfer_set("python", standard.TOKENS), batch_size=texts.BATCH, seed=7)
    cosines, sums = [], [0.0, 0.0]
    for index in range(_ANGLE_BATCHES):
        (batch,) = loader.window(index)
        mine = _gradient(model, source, arm.objectives, batch)
        theirs = _gradient(model, whole, {"kd.weight": 1.0}, batch)
        cosines.append(float(torch.cosine_similarity(mine, theirs, dim=0)))
        sums = [sums[0] + mine, sums[1] + theirs]
    return {
        "mean_cosine": books.mean(cosines),
        "cosine_of_sums": float(torch.cosine_similarity(sums[0], sums[1], dim=0)),
        "length_of_sums": float(sums[0].norm() / sums[1].norm()),
        "batches": _ANGLE_BATCHES,
    }


_TRAINED: list[Any] = []


def _briefly_trained() -> Any:
    if not _TRAINED:
        torch.manual_seed(0)
        model = nets.draw(nets.STUDENT, 0)
        lab.train(standard.job({"kd.weight": 1.0}, 1e-2, 0, _ANGLE_STEPS), model, whole_teacher())
        _TRAINED.append(model)
    return _TRAINED[0]


def _gradient(model: Any, source: Teacher, objectives: Mapping[str, Any], batch: Batch) -> torch.Tensor:
    config = standard.job(objectives, 1e-2, 0).config()
    mix, loss_weights = Mix(config.objectives), Curriculum.of(config).at(0.0)
    student = Student(model, vocab_size=texts.VOCAB, is_described=True)
    student.train()
    model.zero_grad()
    lab.score_batch(student, source, mix, loss_weights, mix.counts([batch]), batch, resolve("fp32"))
    return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


# -- the table -------------------------------------------------------------------------------------------


def draw(book: Book) -> None:
    reference = book.values(FULL)
    rows = [[*standard.HEAD, "bytes a position", "cosine of a batch", "cosine of 64", "length of 64"]]
    for name in (FULL, *ARMS):
        if not book.lines(name):
            continue
        size, angle = book.facts.get(f"bytes {name}", {}), book.facts.get(f"angle {name}", {})
        rows.append(
            [
                *standard.row(book, name, name, reference),
                f"{size['bytes_per_position']:.1f}" if size else "",
                *(f"{angle[key]:.3f}" if angle else "" for key in ("mean_cosine", "cosine_of_sums", "length_of_sums")),
            ]
        )
    default = next(iter(ARMS))
    notes = [standard.NOTE, __doc__.split("\n\n")[2].replace("\n", " ")]
    if reference and book.values(default):
        loss = books.mean(books.paired(book.values(default), reference))
        notes.append(
            f"Bar: the default within 0.02 nats of the whole distribution at 60 bytes a position or fewer: "
            f"{loss:+.3f} nats, {'met' if loss <= 0.02 else 'MISSED'}."
        )
    books.save_table(book, "Sparse answers", [*notes, books.markdown(rows)])


if __name__ == "__main__":
    books.main(__doc__, "sparse", sweep, draw)
