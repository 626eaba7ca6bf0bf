"""The time of a stream of kernels by the rates of a GPU. A model, not a measurement.

The figures of GPUs are those of the package (`stillroom.precision.gpus`). TF32 is off, as torch has it. Nothing reaches
its peak; tables are made at peaks and at what is assumed to be sustained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recorder import Kernel

from stillroom.precision.gpus import GPUS, HOST_SECONDS, LAUNCH_SECONDS, Gpu

LEAST_SECONDS = LAUNCH_SECONDS


@dataclass(frozen=True)
class Facts:
    """What torch says of a card."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class Card:
    facts: Facts
    half_tflops: float  # half operands, FP32 sums
    fp32_tflops: float
    gigabytes_per_second: float
    product_share: float = 1.0  # of the peak that products reach
    memory_share: float = 1.0

    @property
    def name(self) -> str:
        return self.facts.name

    def rate(self, dtype: str) -> float:
        tflops = self.half_tflops if dtype in ("float16", "bfloat16") else self.fp32_tflops
        return tflops * 1e12 * self.product_share

    @property
    def best_rate(self) -> float:
        return max(self.half_tflops, self.fp32_tflops) * 1e12 * self.product_share

    def pass_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.gigabytes_per_second * 1e9 * self.memory_share)

    def kernel_seconds(self, kernel: Kernel) -> float:
        """The longer of arithmetic and memory: in a product they overlap."""
        moved = self.pass_seconds(kernel.bytes_read + kernel.bytes_written)
        computed = kernel.flops / self.rate(kernel.dtype) if kernel.flops else 0.0
        return max(moved, computed, LEAST_SECONDS * kernel.launches)


def _card(gpu: Gpu) -> Card:
    facts = Facts(gpu.name, gpu.capability, gpu.memory_bytes)
    return Card(facts, gpu.half_tflops, gpu.fp32_tflops, gpu.gigabytes_per_second)


*_CARDS, H100 = map(_card, GPUS)  # the cost model of one step does not have the last
CARDS = tuple(_CARDS)


def seconds_by_phase(kernels: Sequence[Kernel], card: Card) -> dict[str, float]:
    """Time on the card's clock, by phase: the host issues, the card works, and a read makes the host wait.

    Time in which the card waits for the host belongs to the phase that the host was issuing.
    """
    host = device = 0.0
    spent: dict[str, float] = {}
    for kernel in kernels:
        before = device
        host += HOST_SECONDS * kernel.launches
        device = max(device, host) + card.kernel_seconds(kernel)
        if kernel.waits:
            host = device
        spent[kernel.phase] = spent.get(kernel.phase, 0.0) + device - before
    return spent


@dataclass(frozen=True)
class Bound:
    """What no program of these products can be faster than, by the same peaks."""

    products: dict[str, float]  # seconds by phase, at the card's best dtype
    logits: float  # one pass over student's and teacher's logits in FP32
    optimizer: float  # one pass over weights, gradients and moments in FP32, and back

    @property
    def head(self) -> float:
        return self.products.get("head", 0.0) + self.logits

    @property
    def step(self) -> float:
        return sum(self.products.values()) + self.logits + self.optimizer

    @property
    def step_without_logits(self) -> float:
        return self.step - self.logits


def bound(kernels: Sequence[Kernel], card: Card, *, tokens: int, vocabulary: int, num_trained: int) -> Bound:
    """Of a stream that makes each product once. Products move half operands and half results."""
    products: dict[str, float] = {}
    for kernel in kernels:
        if kernel.is_product:
            narrow = 1.0 if kernel.dtype in ("float16", "bfloat16") else 0.5
            moved = card.pass_seconds((kernel.bytes_read + kernel.bytes_written) * narrow)
            # A chunked pass reads its weight for every chunk, and open attention writes its scores: neither must be.
            moved = 0.0 if kernel.phase == "head" or kernel.name == "bmm" else moved
            seconds = max(kernel.flops / card.best_rate, moved)
            products[kernel.phase] = products.get(kernel.phase, 0.0) + seconds
    logits = card.pass_seconds(2 * 4 * tokens * vocabulary)
    return Bound(products, logits, card.pass_seconds(28 * num_trained))
