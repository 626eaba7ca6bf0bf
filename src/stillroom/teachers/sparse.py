"""A live teacher that answers with a few tokens: what a cache stores, made while the student trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any

import torch

from stillroom.core.shortages import is_out_of_memory
from stillroom.core.types import Batch, DenseSignal, Needs, PairedTokens, SampledSignal, Signal, TopKSignal
from stillroom.losses.head.products import logits_from_bf16
from stillroom.models import Student
from stillroom.teachers.base import SignalKind, Teacher
from stillroom.teachers.live import LiveTeacher
from stillroom.teachers.signals import Coarse, RowAnswer, SignalSpec, reduce_row, signal_of

Kept = TopKSignal | SampledSignal | PairedTokens

_GPU_TOKENS = 16_384  # asked at once where a batch pays; halved where memory does not suffice


class SparseTeacher(Teacher):
    """Reduces the answers of a live teacher, row by row.

    On a CPU each row is asked by itself, without padding, because a product's last bits may depend on what it is
    computed together with: the answer is then a function of the row. It costs nothing there: rows are long enough to
    fill the machine. On a GPU rows are asked together, and live and stored answers agree to rounding.
    """

    def __init__(
        self, live: LiveTeacher, spec: SignalSpec, *, notes: Sequence[str] = (), coarse: Coarse | None = None
    ) -> None:
        """`coarse` is for a student of another tokenizer: the tokens that both have, and one for all others."""
        self.live = live
        self._coarse = None if coarse is None else coarse.to(live.device)
        self.spec = spec.within(live.vocab_size if coarse is None else len(coarse.kept))
        self.kind: SignalKind = kind_of_spec(spec)
        self.num_exact = self.spec.exact
        self.writes_text, self.answers_last = live.writes_text, live.answers_last
        self.notes = (f"the teacher answers live with {describe(self.spec)}", *live.notes, *notes)
        self.batch_tokens = 1 if live.device.type == "cpu" else _GPU_TOKENS
        self._whole: tuple[tuple[str, ...], DenseSignal] | None = None
        self._mass, self._positions = 0.0, 0

    # -- answering ---------------------------------------------------------------------------------------

    def observe(self, batch: Batch, needs: Needs) -> Signal:
        (answers,) = self.answer_rows(batch, [self.spec], keeps_whole=True)
        self._mass += sum(float(answer.mass.sum()) for answer in answers)
        self._positions += batch.num_scored
        return to_device(signal_of(RowAnswer.join(answers), self.spec), self.live.device)

    def whole_answer(self, batch: Batch, signal: Signal | None) -> Signal | None:
        """The dense answer behind the last signal: it is available."""
        if self._whole is not None and self._whole[0] == batch.keys:
            return self._whole[1]
        return signal

    @torch.no_grad()
    def answer_rows(
        self, batch: Batch, specs: Sequence[SignalSpec], *, keeps_whole: bool = False
    ) -> list[list[RowAnswer]]:
        """For each signal the answer to each row of a batch; a row without targets has one of no positions."""
        there = batch.to(self.live.device)
        parts = self._row_by_row(there) if self.live.device.type == "cpu" else self._together(there)
        # Cast once: what is computed from the logits is FP32 for every dtype of the teacher. A CPU with BF16 units has
        # FP32 logits of a BF16 head without that.
        head = parts[0][0].head
        if not head.is_identity and logits_from_bf16(parts[0][0].hidden[:0], head) is None:
            head = replace(head, weight=head.weight.float())
        if keeps_whole:
            hidden = torch.cat([signal.hidden for signal in parts[0]])
            self._whole = batch.keys, replace(parts[0][0], hidden=hidden, taps={})
        return [
            [
                reduce_row(signal.hidden, head, targets, spec, key, self._coarse)
                for key, signal, targets in zip(batch.keys, *parts, strict=True)
            ]
            for spec in specs
        ]

    def _row_by_row(self, batch: Batch) -> tuple[list[DenseSignal], list[torch.Tensor]]:
        with self.live.at_work():
            rows = [_row(batch, number) for number in range(batch.input_ids.shape[0])]
            return [self.live.observe(row, Needs()) for row in rows], [row.scored_targets for row in rows]

    def _together(self, batch: Batch) -> tuple[list[DenseSignal], list[torch.Tensor]]:
        """One forward for the whole batch, or for its halves where memory does not suffice."""
        try:
            whole = self.live.observe(batch, Needs())
        except (MemoryError, RuntimeError) as error:
            if batch.input_ids.shape[0] == 1 or not is_out_of_memory(error):
                raise
            self.batch_tokens = max(1, self.batch_tokens // 2)
            first, second = (self._together(half) for half in batch.parts(2))
            return first[0] + second[0], first[1] + second[1]
        sizes = torch.bincount(batch.positions // batch.input_ids.shape[1], minlength=batch.input_ids.shape[0])
        counts = sizes.tolist()
        signals = [replace(whole, hidden=part) for part in torch.split(whole.hidden, counts)]
        return signals, list(torch.split(batch.scored_targets, counts))

    def as_model(self) -> Student | None:
        return self.live.as_model()

    def at_work(self) -> AbstractContextManager[None]:
        return self.live.at_work()

    def summary(self) -> dict[str, Any]:
        mass = self._mass / self._positions if self._positions and self.spec.exact else None
        return {**self.live.summary(), "teacher_signal": {**self.spec.to_dict(), "mean_mass": mass}}


def describe(spec: SignalSpec) -> str:
    """A signal in words."""
    told = {
        "top_k": f"its top {spec.exact} tokens and the exact mass of the rest",
        "sampled": f"{spec.draws} tokens drawn from its distribution",
        "hybrid": f"its top {spec.exact} tokens exactly and {spec.draws} drawn from the rest",
        "renormalised": f"its top {spec.exact} tokens as if nothing else could come, which is biased",
        "target": "the probability of each target alone",
    }
    if spec.is_paired and spec.shared:
        shared = "over what both vocabularies can say, and the probability of each target"
        return f"{told[spec.kind]}, {shared}, at temperature {spec.temperature:g}"
    return f"{told[spec.kind]}, at temperature {spec.temperature:g}"


def kind_of_spec(spec: SignalSpec) -> SignalKind:
    if spec.is_paired:
        return "paired"
    return "sampled" if spec.is_sampled else "top-k"


def to_device(signal: Kept, device: torch.device) -> Kept:
    return signal if device.type == "cpu" else each_tensor(signal, lambda one: one.to(device, non_blocking=True))


def each_tensor(signal: Kept, change: Callable[[torch.Tensor], torch.Tensor]) -> Kept:
    """The signal with every tensor changed."""
    found: dict[str, Any] = {}
    for one in fields(signal):
        value = getattr(signal, one.name)
        if isinstance(value, torch.Tensor):
            found[one.name] = change(value)
        elif isinstance(value, TopKSignal | SampledSignal):
            found[one.name] = each_tensor(value, change)
    return replace(signal, **found)


def _row(batch: Batch, number: int) -> Batch:
    """One row of a batch, without its padding."""
    length, part = max(1, int(batch.attention_mask[number].sum())), slice(number, number + 1)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[part, :length]

    return Batch(
        cut(batch.input_ids),
        cut(batch.attention_mask),
        cut(batch.targets),
        cut(batch.target_bytes),
        batch.sample_ids[part],
        batch.index,
        batch.documents[part],
        segments=None if batch.segments is None else cut(batch.segments),
    )
