"""Published figures of GPUs, and the seconds that a list of kernels takes at given rates. A model, not a measurement.

Rates are dense ones of NVIDIA's data sheets, with FP32 sums and without sparsity. A P100 has no tensor cores; its half
products are faster only when they are summed in half, which nothing here does. Nothing reaches its peak for long: a T4
sustains about 24 of 65 TFLOP/s in large products under its limit of 70 W (NVIDIA's developer forum, thread 264462), and
80 % of a bandwidth is what copies usually reach. For other GPUs half of the peak is assumed.

Memory is what torch shows as `total_memory`, less than what the data sheet says. The T4's 14.56 of 16 GiB is the lowest
figure in users' reports: its ECC takes a sixteenth, and the driver the rest. Of the other GPUs nothing was read: the
same share of their data sheet is assumed. It promises too little where ECC takes nothing of it, as in HBM.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stillroom.core.errors import ConfigError
from stillroom.precision.device import DeviceFacts

# An eager op takes the host about this long, from Python to the queue of the GPU; a kernel that does nothing takes the
# GPU about that long.
HOST_SECONDS, LAUNCH_SECONDS = 6e-6, 2e-6
_GIB = 2**30
_SHOWN = 14.56 / 16


@dataclass(frozen=True)
class Rates:
    """What a device reaches: published, assumed to be sustained, or measured."""

    half: float  # FLOP/s from half operands into FP32
    fp32: float
    bandwidth: float  # bytes/s, read and written together
    launch: float = LAUNCH_SECONDS
    host: float = HOST_SECONDS


class Kernels(NamedTuple):
    """So many kernels that are alike."""

    number: int
    flops: float
    dtype: Literal["half", "fp32"]  # of the operands of a product
    num_bytes: float
    launches: int = 1

    def seconds(self, rates: Rates) -> float:
        """The longer of arithmetic and memory: in a product they overlap."""
        computed = self.flops / (rates.half if self.dtype == "half" else rates.fp32)
        return self.number * max(computed, self.num_bytes / rates.bandwidth, rates.launch * self.launches)


def seconds_of(kernels: Iterable[Kernels], rates: Rates) -> float:
    """The GPU works as long as its kernels, or waits for the host that issues them."""
    listed = list(kernels)
    return max(sum(one.seconds(rates) for one in listed), rates.host * sum(one.number * one.launches for one in listed))


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    memory_gib: int  # of the data sheet
    half_tflops: float
    fp32_tflops: float
    gigabytes_per_second: float
    product_share: float = 0.5  # of the peak that large products sustain
    memory_share: float = 0.8

    @property
    def memory_bytes(self) -> int:
        """As torch shows it."""
        return int(_SHOWN * self.memory_gib * _GIB)

    @property
    def peak(self) -> Rates:
        return Rates(1e12 * self.half_tflops, 1e12 * self.fp32_tflops, 1e9 * self.gigabytes_per_second)

    @property
    def sustained(self) -> Rates:
        peak, share = self.peak, self.product_share
        return Rates(share * peak.half, max(share, 0.8) * peak.fp32, self.memory_share * peak.bandwidth)

    @property
    def facts(self) -> DeviceFacts:
        return DeviceFacts(
            "cuda",
            self.name,
            has_native_bf16=self.capability >= (8, 0),
            memory_bytes=self.memory_bytes,
            has_tensor_cores=self.capability >= (7, 0),
        )


GPUS = (
    Gpu("T4", (7, 5), 16, 65.0, 8.1, 320.0, product_share=24 / 65),
    Gpu("V100", (7, 0), 16, 125.0, 15.7, 900.0),  # SXM2
    Gpu("P100", (6, 0), 16, 9.3, 9.3, 732.0, product_share=0.8),  # PCIe
    Gpu("L4", (8, 9), 24, 121.0, 30.3, 300.0),
    Gpu("A100", (8, 0), 40, 312.0, 19.5, 1555.0),  # SXM
    Gpu("H100", (9, 0), 80, 989.0, 66.9, 3350.0),  # SXM
)


def find_gpu(name: str) -> Gpu:
    known = next((gpu for gpu in GPUS if gpu.name.lower() == name.lower()), None)
    if known is None:
        raise ConfigError(
            f"no figures of a GPU {name!r} are known",
            where="--gpu",
            advice=[f"one of {', '.join(gpu.name for gpu in GPUS)}", "--device-memory 16GB for any other"],
        )
    return known


def gpu_in(name: str) -> Gpu | None:
    """The GPU whose name is a word of what torch calls it, as in "Tesla T4" and "NVIDIA A100-SXM4-40GB"."""
    words = name.upper().replace("-", " ").split()
    return next((gpu for gpu in GPUS if gpu.name in words), None)
