"""What a run costs: tokens, steps, arithmetic of both models, and time.

Two operations for each weight that a token is multiplied with, twice that again in the backward pass (Kaplan et al.
2020), and attention over the positions before each.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stillroom.config import Config
from stillroom.core.errors import ConfigError
from stillroom.precision.device import DeviceFacts
from stillroom.training.memory import Layout, cache_bytes
from stillroom.training.trace import Sizes

_GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """Published figures of a GPU: a model of time, not a measurement.

    Dense rates of NVIDIA's data sheets, with FP32 sums and without sparsity. A P100 has no tensor cores; its half
    products are faster only when they are summed in half, which nothing here does.
    """

    name: str
    memory_bytes: int
    half_tflops: float
    fp32_tflops: float
    has_native_bf16: bool
    has_tensor_cores: bool = True

    def flops(self, mode: str) -> float:
        return 1e12 * (self.fp32_tflops if mode == "fp32" else self.half_tflops)

    @property
    def facts(self) -> DeviceFacts:
        return DeviceFacts(
            "cuda", self.name, self.has_native_bf16, self.memory_bytes, has_tensor_cores=self.has_tensor_cores
        )


GPUS = (
    Gpu("T4", 16 * _GIB, 65.0, 8.1, has_native_bf16=False),
    Gpu("V100", 16 * _GIB, 125.0, 15.7, has_native_bf16=False),  # SXM2
    Gpu("P100", 16 * _GIB, 9.3, 9.3, has_native_bf16=False, has_tensor_cores=False),  # PCIe
    Gpu("L4", 24 * _GIB, 121.0, 30.3, has_native_bf16=True),
    Gpu("A100", 40 * _GIB, 312.0, 19.5, has_native_bf16=True),  # SXM
    Gpu("H100", 80 * _GIB, 989.0, 66.9, has_native_bf16=True),  # SXM
)


def find_gpu(name: str) -> Gpu:
    known = next((gpu for gpu in GPUS if gpu.name.lower() == name.lower()), None)
    if known is None:
        raise ConfigError(
            f"unknown GPU {name!r}",
            where="--card",
            advice=[f"one of {', '.join(gpu.name for gpu in GPUS)}", "--device-memory 16GB for any other"],
        )
    return known


@dataclass(frozen=True)
class Cost:
    steps: int | None  # None: not known without counting the data
    tokens: int | None
    tokens_per_step: int
    passes: float | None  # over the training data
    teacher_flops_per_token: float
    student_flops_per_token: float
    seconds_per_step: float | None
    seconds_from: str  # what the time is from; empty where there is none
    cache_bytes_per_token: float

    @property
    def ratio(self) -> float:
        """Teacher over student."""
        return self.teacher_flops_per_token / self.student_flops_per_token

    @property
    def cached_over_live(self) -> float | None:
        """Arithmetic of this run with stored answers over that with a live teacher: the teacher reads each text once.

        At one pass both are the same, so a cache pays from the second pass, or the second run, on the same data.
        """
        if self.passes is None or not self.teacher_flops_per_token:
            return None
        written = min(1.0, self.passes) * self.teacher_flops_per_token
        live = self.passes * (self.teacher_flops_per_token + self.student_flops_per_token)
        return (written + self.passes * self.student_flops_per_token) / live

    def to_dict(self) -> dict[str, Any]:
        seconds = self.seconds_per_step
        return {
            **asdict(self),
            "ratio": self.ratio,
            "cached_over_live": self.cached_over_live,
            "seconds": seconds * self.steps if seconds is not None and self.steps is not None else None,
        }


def forward_flops(sizes: Sizes, length: int) -> float:
    """Operations of one token, head included, in a row of this length."""
    multiplied = sizes.parameters - sizes.embedding - sizes.experts * (1.0 - sizes.visited)
    return 2.0 * multiplied + 2.0 * sizes.layers * length * sizes.width  # half of the positions lie before


def cost_of(
    config: Config,
    layout: Layout,
    *,
    teacher: Sizes | None,
    counted: tuple[int, int] | None = None,
    gpu: Gpu | None = None,
    measured: float | None = None,
) -> Cost:
    """`counted` are the steps and tokens of one pass over the data; `measured` the seconds of a real step."""
    train, length = config.train, config.data.max_length
    per_step = train.rows_per_batch * train.gradient_accumulation_steps * length
    steps = train.max_steps or None
    passes = None
    if counted is not None:
        steps = train.max_steps or max(1, round(counted[0] * train.epochs))
        passes = steps / counted[0]
    student = forward_flops(layout.sizes, length)
    backward = 1.0 if config.student.adapter is not None else 2.0  # frozen weights have no gradient
    student *= 1.0 + backward + config.student.gradient_checkpointing
    teaching = forward_flops(teacher, length) if teacher is not None else 0.0
    seconds, source = measured, "one real step, measured on this machine" if measured is not None else ""
    if measured is None and gpu is not None:
        asked = 0.0 if config.teacher.cache else teaching
        seconds = per_step * (asked + student) / gpu.flops(layout.mode)
        source = f"a model: all products at the published peak of a {gpu.name}; real steps take longer"
    return Cost(
        steps=steps,
        tokens=steps * per_step if steps else None,
        tokens_per_step=per_step,
        passes=passes,
        teacher_flops_per_token=teaching,
        student_flops_per_token=student,
        seconds_per_step=seconds,
        seconds_from=source,
        cache_bytes_per_token=cache_bytes(config),
    )
