"""Whether a run on a CPU is faster in BF16: both rates, measured for a second at the run's own shapes.

CPUs with BF16 units multiply BF16 two to four times as fast as FP32, others slower. Only a measurement tells: what the
rates are depends on the processor, on torch's libraries and on the shapes. Small students are not measured, so that
what they compute is the same on every machine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from stillroom.config import Config
from stillroom.losses.head.kernel import Bf16Products, bf16_products
from stillroom.losses.head.products import PARTS
from stillroom.precision.device import DeviceFacts

LEAST_PARAMETERS = 20_000_000  # of the student that is trained: below, a run stays in FP32
_SECONDS = 0.4  # for the products of the bodies, and again for those of the head
_MOST_TOKENS, _CHUNK = 1024, 256
_MOST_WEIGHTS = 1 << 22  # of a head that is measured: a slice of a large vocabulary has its rate


@dataclass(frozen=True)
class Shape:
    """What the time of a step depends on."""

    tokens: int  # of a micro-batch
    rows: int  # of the body's largest matrix
    columns: int
    vocabulary: int
    width: int
    body_parameters: int


@dataclass(frozen=True)
class Rates:
    """Measured GFLOP/s of a core, in CPU seconds: other processes hardly change them.

    Those of the head in BF16 are useful ones: the second parts are not counted.
    """

    body_fp32: float
    body_bf16: float
    head_fp32: float
    head_bf16: float

    def gain(self, shape: Shape) -> float:
        """How many times as fast the student's products are in BF16."""
        body, head = shape.body_parameters, shape.vocabulary * shape.width
        return (body / self.body_fp32 + head / self.head_fp32) / (body / self.body_bf16 + head / self.head_bf16)

    def sentence(self, shape: Shape) -> str:
        bodies, head = (
            f"{half:.0f} against {wide:.0f}"
            for half, wide in ((self.body_bf16, self.body_fp32), (self.head_bf16, self.head_fp32))
        )
        return (
            f"BF16 against FP32 at the run's shapes, GFLOP/s a core: bodies {bodies}, head {head}; together "
            f"{self.gain(shape):.1f} times as fast"
        )


def shape_of(student: Any, tokens: int) -> Shape | None:
    """The shapes of a student's products; None where it has no separate head."""
    head = student.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), torch.Tensor):
        return None
    outer = {id(head.weight)} | {id(weight) for weight in student.get_input_embeddings().parameters()}
    body = [weight for weight in student.parameters() if weight.ndim == 2 and id(weight) not in outer]
    if not body:
        return None
    largest = max(body, key=lambda weight: weight.numel())
    rows, columns = largest.shape
    vocabulary, width = head.weight.shape
    return Shape(tokens, rows, columns, vocabulary, width, sum(weight.numel() for weight in body))


@functools.cache
def measure(shape: Shape, products: Bf16Products) -> Rates:
    """Both rates of bodies and head, each the best of alternating turns."""
    tokens, chunk = min(shape.tokens, _MOST_TOKENS), min(shape.tokens, _CHUNK)
    inputs, weight = torch.ones(tokens, shape.columns), torch.ones(shape.rows, shape.columns)
    half = inputs.bfloat16(), weight.bfloat16()
    body = _rates(
        2e-9 * tokens * shape.rows * shape.columns,
        lambda: torch.mm(inputs, weight.t()),
        lambda: torch.mm(half[0], half[1].t()),
    )
    vocabulary = max(1, min(shape.vocabulary, _MOST_WEIGHTS // shape.width))
    hidden, head = torch.ones(chunk, shape.width), torch.ones(vocabulary, shape.width)
    logits, to_hidden, to_weight = torch.ones(chunk, vocabulary), torch.ones_like(hidden), torch.ones_like(head)

    def wide() -> None:
        torch.mm(hidden, head.t(), out=logits)
        torch.mm(logits, head, out=to_hidden)
        torch.mm(logits.t(), hidden, out=to_weight)

    def parts() -> None:
        products.logits(hidden, head, logits, parts=PARTS)
        products.to_hidden(logits, head, to_hidden)
        products.to_weight(logits, hidden, to_weight, adds=False)

    return Rates(*body, *_rates(6e-9 * chunk * vocabulary * shape.width, wide, parts))


def _rates(gigaflops: float, *works: Callable[[], object]) -> tuple[float, float]:
    best, begin = [float("inf")] * len(works), time.process_time()
    turn = 0
    while turn < 2 or time.process_time() - begin < _SECONDS:  # the first turn warms up
        for place, work in enumerate(works):
            started = time.process_time()
            work()
            best[place] = min(best[place], time.process_time() - started)
        turn += 1
    wide, half = (gigaflops / max(seconds, 1e-9) for seconds in best)
    return wide, half


def with_rates(facts: DeviceFacts, shape: Shape | None, num_parameters: int, *, num_processes: int = 1) -> DeviceFacts:
    """The facts of a CPU with what was measured on it. Nothing is measured where `auto` stays in FP32 anyway."""
    if facts.kind != "cpu" or num_parameters < LEAST_PARAMETERS:
        return facts
    if num_processes > 1:  # each would measure for itself, and they have to agree
        return replace(facts, measured="several processes: not measured")
    products = bf16_products()
    if products is None or shape is None:
        return facts
    rates = measure(shape, products)
    return replace(facts, bf16_gain=rates.gain(shape), measured=rates.sentence(shape), rates=vars(rates))


def answers_in_bf16(config: Config, mode: str, device_type: str, num_parameters: int) -> bool:
    """Whether a teacher whose dtype is left to us has BF16 weights next to a student in bf16-mixed on a CPU.

    By what the run and the machine are, not by what was measured: a resumed run has the teacher it began with.
    """
    if mode != "bf16-mixed" or device_type != "cpu" or num_parameters < LEAST_PARAMETERS:
        return False
    section = config.teacher
    is_plain = section.placement == "device" and section.router.mode == "frozen" and section.quantisation == "none"
    return section.dtype == "auto" and is_plain and bf16_products() is not None
