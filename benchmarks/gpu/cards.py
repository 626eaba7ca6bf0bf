"""Published peaks of the cards, and the time of a stream of kernels by them. A model, not a measurement.

Figures are those of NVIDIA's data sheets: dense tensor-core rates with FP32 sums, without sparsity. A P100 has no
tensor cores; its half products are twice as fast only when they are also summed in half, which nothing here does.
TF32 is off, as torch has it. Nothing reaches its peak; the table of assumptions in the results says what changes if
less is reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recorder import Kernel

# An eager op takes the host about this long, from Python to the queue of the card; a kernel that does nothing takes the
# card about that long. The two overlap: the host runs ahead until it waits for a value.
HOST_SECONDS, LEAST_SECONDS = 6e-6, 2e-6
_GIB = 2**30


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


CARDS = (
    Card(Facts("T4", (7, 5), 16 * _GIB), 65.0, 8.1, 320.0),
    Card(Facts("V100", (7, 0), 16 * _GIB), 125.0, 15.7, 900.0),  # SXM2
    Card(Facts("P100", (6, 0), 16 * _GIB), 9.3, 9.3, 732.0),  # PCIe, 16 GB
    Card(Facts("L4", (8, 9), 24 * _GIB), 121.0, 30.3, 300.0),
    Card(Facts("A100", (8, 0), 40 * _GIB), 312.0, 19.5, 1555.0),  # SXM, 40 GB
)
H100 = Card(Facts("H100", (9, 0), 80 * _GIB), 989.0, 66.9, 3350.0)  # SXM; the cost model of one step does not have it


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
