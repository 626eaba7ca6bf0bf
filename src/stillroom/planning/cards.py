"""Published peaks of cards: a model of time, not a measurement.

Dense rates of NVIDIA's data sheets, with FP32 sums and without sparsity. A P100 has no tensor cores; its half products
are faster only when they are summed in half, which nothing here does.
"""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True)
class Card:
    name: str
    memory_bytes: int
    half_tflops: float
    fp32_tflops: float
    has_native_bf16: bool
    has_tensor_cores: bool = True

    def flops(self, mode: str) -> float:
        return 1e12 * (self.fp32_tflops if mode == "fp32" else self.half_tflops)


CARDS = (
    Card("T4", 16 * _GIB, 65.0, 8.1, has_native_bf16=False),
    Card("V100", 16 * _GIB, 125.0, 15.7, has_native_bf16=False),  # SXM2
    Card("P100", 16 * _GIB, 9.3, 9.3, has_native_bf16=False, has_tensor_cores=False),  # PCIe
    Card("L4", 24 * _GIB, 121.0, 30.3, has_native_bf16=True),
    Card("A100", 40 * _GIB, 312.0, 19.5, has_native_bf16=True),  # SXM
    Card("H100", 80 * _GIB, 989.0, 66.9, has_native_bf16=True),  # SXM
)
