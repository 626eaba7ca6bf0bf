"""Small problems for the kernels of the head and the optimizer, with the float64 answer, to be run as PTX.

Legend: C rows, V vocabulary, K kept ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from ptx import Run
from ptx_launch import Built, build, execute
from torch import Tensor

from stillroom.core.launch import Launch
from stillroom.core.types import SampledSignal, TopKSignal
from stillroom.losses import divergences
from stillroom.losses.head.kernel_triton import prepare
from stillroom.losses.head.rows import (
    GradientRows,
    HalfRequest,
    Logits,
    PlainKernel,
    RowPlan,
    RowRecord,
    TeacherRows,
    padded,
)
from stillroom.precision import adamw_triton

T4 = 75
MANY = 1000  # blocks at once: no vocabulary is cut in more parts


@dataclass(frozen=True)
class Errors:
    """Largest deviations from float64: of kd and ce in nats, of the gradient over its largest entry."""

    kd: float
    ce: float
    gradient: float
    norm: float  # of the gradient's deviation, over the gradient's norm; rounding to FP16's 11 bits alone is about 2e-4
    row_sum: float  # of what is written, with what rounding took
    halves: float  # of the gradient, in units of half of FP16's last place at each entry: 1 is rounding alone


class RowCase:
    """A chunk of rows on the way through a Triton kernel, and the same through the plain kernel in float64."""

    def __init__(
        self,
        divergence: str = "forward_kl",
        num_tokens: int = 1000,
        *,
        settings: dict[str, float] | None = None,
        kind: str = "dense",
        temperature: float | None = 1.0,
        num_rows: int = 1,
        num_blocks: int = 0,
        num_kept: int = 64,
        half: torch.dtype | None = torch.float16,
        is_heaviest_known: bool = True,
        mean: float = 0.0,
        gap: float | None = None,
        softcap: float | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_rows, self.num_tokens = num_rows, num_tokens

        def draw() -> Tensor:
            return torch.randn(num_rows, num_tokens, generator=generator) * 3.0 + mean

        given = draw()
        other = given + gap * draw() if gap is not None else draw()
        self.temperatures = torch.full((num_rows,), temperature or 1.0)
        if temperature is None:
            self.temperatures = torch.linspace(0.7, 2.0, num_rows)
        self.plan = RowPlan(
            divergences.make(divergence, settings or {}) if kind != "none" else None,
            has_ce=True, is_unit_temperature=temperature == 1.0, wants_student=True, wants_teacher=False,
        )  # fmt: skip
        self._given, self._softcap = given, softcap
        self._teacher = _teacher_of(kind, other, self.temperatures, num_kept, generator)
        heaviest = (0.7, 0.6, float(self.temperatures.max())) if is_heaviest_known else None
        self.half = None if half is None else HalfRequest(half, heaviest)
        self.rows = self._record(torch.float32)
        self.student = Logits(_in_scratch(given), softcap=softcap, half=self.half)
        placed = self._teacher
        if isinstance(placed, Logits):
            placed = Logits(_in_scratch(placed.raw))
        self.launch: Launch
        self._gradient: GradientRows | None
        self.launch, self._gradient = prepare(self.student, placed, self.rows, self.plan, num_blocks)

    def _record(self, dtype: torch.dtype) -> RowRecord:
        count = self.num_rows
        return RowRecord(
            targets=(torch.arange(count) * 7 + 3) % self.num_tokens,
            temperatures=self.temperatures.to(dtype),
            kd_weights=torch.linspace(0.7, 0.1, count).to(dtype),
            ce_weights=torch.linspace(0.6, 0.2, count).to(dtype),
            kd=torch.zeros(count, dtype=dtype),
            ce=torch.zeros(count, dtype=dtype),
            is_bad=torch.zeros(count, dtype=torch.bool),
        )

    def executed(self, built: Built | None = None, **options: Any) -> Run:
        return execute(self.launch, built or build(self.launch, T4), **options)

    def gradient(self) -> tuple[Tensor, Tensor]:
        """What was written, in float64, and the sums of its rows with what rounding took from them."""
        if self._gradient is None:
            return self.student.raw.double(), self.student.raw.double().sum(-1)
        found = self._gradient.summed()
        lifts = torch.full((self.num_rows,), found.lift) if found.lifts is None else found.lifts
        power = 2.0 ** -lifts.double()
        assert found.lost is not None
        return found.values.double() * power[:, None], (found.values.double().sum(-1) + found.lost.double()) * power

    def expected(self) -> tuple[RowRecord, Tensor]:
        rows, student = self._record(torch.float64), Logits(self._given.double(), softcap=self._softcap)
        PlainKernel().run(student, _doubled(self._teacher), rows, self.plan)
        return rows, student.raw

    def errors(self) -> Errors:
        rows, gradient = self.expected()
        found, sums = self.gradient()
        largest, deviation = gradient.abs().max(), (found - gradient).abs()
        last_place = 2.0 ** (torch.frexp(gradient)[1] - 12).double()
        return Errors(
            kd=float((self.rows.kd - rows.kd).abs().max()),
            ce=float((self.rows.ce - rows.ce).abs().max()),
            gradient=float(deviation.max() / largest),
            norm=float(deviation.norm() / gradient.norm()),
            row_sum=float((sums - gradient.sum(-1)).abs().max() / largest),
            halves=float(((deviation - 1e-6 * largest).clamp_min(0) / last_place).max()),
        )

    def bytes_per_element(self, run: Run) -> dict[str, float]:
        """Sectors of the logits, and of everything else (weights of rows, sums that blocks exchange)."""
        logits = ("student", "teacher")
        count = self.num_rows * self.num_tokens
        read, written = run.bytes_read(*logits) / count, run.bytes_written(*logits) / count
        return {
            "read": read,
            "written": written,
            "small": (run.bytes_read() + run.bytes_written()) / count - read - written,
        }


def _in_scratch(values: Tensor) -> Tensor:
    """The rows in memory as the product has it: padded, and nobody has written to the padding."""
    full = torch.full((values.shape[0], padded(values.shape[1])), math.nan)
    full[:, : values.shape[1]] = values
    return full[:, : values.shape[1]]


def _teacher_of(
    kind: str, logits: Tensor, temperatures: Tensor, num_kept: int, generator: torch.Generator
) -> TeacherRows | None:
    count, num_tokens = logits.shape
    if kind == "top-k":
        log_probs = torch.log_softmax(logits.double() / temperatures[:, None], -1)
        ids = log_probs.topk(num_kept).indices
        rest = torch.logsumexp(log_probs.scatter(-1, ids, -math.inf), -1)
        return TopKSignal(ids, log_probs.gather(-1, ids).float(), rest.float())
    if kind == "sampled":
        ids = torch.randint(num_tokens, (count, num_kept), generator=generator)
        ids[:, num_kept // 2] = ids[:, 0]  # samples repeat
        weights = torch.softmax(torch.randn(count, num_kept, generator=generator), -1)
        return SampledSignal(ids, weights, torch.ones(count))
    return Logits(logits) if kind == "dense" else None


def _doubled(teacher: TeacherRows | None) -> TeacherRows | None:
    match teacher:
        case Logits():
            return Logits(teacher.raw.double())
        case TopKSignal():
            return TopKSignal(teacher.ids, teacher.log_probs.double(), teacher.tail_log_mass.double())
        case SampledSignal():
            return SampledSignal(teacher.ids, teacher.weights.double(), teacher.entropy.double())
    return None


class AdamCase:
    """Three tensors on the way through the AdamW kernel, and the same in float64."""

    RATE, DECAY, BETAS, EPSILON, FACTOR, COUNT = 1e-3, 0.1, (0.9, 0.95), 1e-8, 2.0**-12, 3.0

    def __init__(self, *, is_half: bool, sizes: tuple[int, ...] = (24_576, 5_003, 16)) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(spread: float = 1.0) -> list[Tensor]:
            return [torch.randn(size, generator=generator) * spread for size in sizes]

        self.num_parameters = sum(sizes)
        self.weights, self.firsts = draw(), draw()
        self.seconds = [one.square() for one in self.firsts]
        self.gradients = [one.half() if is_half else one for one in draw(4096.0)]
        self.halves = [one.half() for one in self.weights] if is_half else []
        self._before = [[one.double() for one in held] for held in (self.weights, self.firsts, self.seconds)]
        self.launch = adamw_triton.prepare(
            self.weights, self.gradients, self.firsts, self.seconds, self.halves,
            [torch.full((), self.COUNT) for _ in sizes], factor=self.FACTOR, rate=self.RATE, decay=self.DECAY,
            betas=self.BETAS, epsilon=self.EPSILON,
        )  # fmt: skip

    def executed(self, built: Built | None = None, **options: Any) -> Run:
        return execute(self.launch, built or build(self.launch, T4), **options)

    def error(self) -> float:
        """The largest relative deviation of weights and moments from float64."""
        worst = 0.0
        beta1, beta2 = self.BETAS
        for place, gradient in enumerate(self.gradients):
            weight, first, second = (held[place] for held in self._before)
            scaled = gradient.double() * self.FACTOR
            first = beta1 * first + (1 - beta1) * scaled
            second = beta2 * second + (1 - beta2) * scaled.square()
            root = (second / (1 - beta2**self.COUNT)).sqrt() + self.EPSILON
            weight = weight * (1 - self.RATE * self.DECAY) - self.RATE / (1 - beta1**self.COUNT) * first / root
            for held, exact in ((self.weights, weight), (self.firsts, first), (self.seconds, second)):
                worst = max(worst, float((held[place] - exact).abs().max() / exact.abs().max()))
        return worst
