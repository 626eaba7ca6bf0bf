"""Precision policies: the only code that knows about dtypes, loss scaling and master weights.

The base class is FP32 and does nothing; each mode overrides what it changes. The training step calls the
same five methods whatever the mode, so it never mentions a scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stillroom.config.schema import Config, PrecisionConfig, TrainConfig
from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.precision.adamw import AdamW, ParameterGroup
from stillroom.precision.blocks import FORMATS
from stillroom.precision.device import DeviceFacts, check_device, facts_of, wide_sums
from stillroom.precision.storage import Direct, Gathered, Master, Rounded, Split, Stochastic, Storage

# -- budget ----------------------------------------------------------------------------------------
# How many bytes a trained parameter takes, by part.
#
# Every budget asks here: the choice of a precision by the GPU's memory, and the choice of where snapshots are kept.


Moments = Literal["float32", "bfloat16", "int8"]
_BYTES: dict[Moments, int] = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class BytesPerParameter:
    """Of a matrix. Norm gains and biases have FP32 masters in every FP16 mode; they are too few to be counted.

    The scales of int8 moments are not counted either: a sixty-fourth of their codes.
    """

    # On the device.
    weights: int
    extra: int  # the master or the residual
    moments: int
    gradients: int
    casts: int  # autocast keeps a half copy of each weight from the forward to the backward
    # In main memory.
    snapshot: int  # one of the ring
    best: int  # the best student so far

    @property
    def on_device(self) -> int:
        return self.weights + self.extra + self.moments + self.gradients + self.casts

    def in_main_memory(self, num_snapshots: int) -> int:
        return num_snapshots * self.snapshot + self.best


# mode: weights, master or residual, gradients, casts
_PARTS = {
    "fp32": (4, 0, 4, 0),
    "bf16-mixed": (4, 0, 4, 2),
    "fp16-mixed": (4, 0, 4, 2),
    "fp16-master": (2, 4, 2, 0),
    "fp16-split": (2, 2, 2, 0),
    "fp16-sr": (2, 0, 2, 0),
}


def bytes_per_parameter(
    mode: str, moments: Moments = "float32", *, accumulates: bool = False, num_moments: int = 2
) -> BytesPerParameter:
    """The parts of a mode. `accumulates`: over several micro-batches, FP16 gradients are summed in FP32.

    AdamW has two moments, Muon one.
    """
    mode, _plus, blocks = mode.partition("+")  # with +blocks: weights are rounded, and have FP32 masters
    weights, extra, gradients, casts = _PARTS[mode]
    extra += 4 if blocks else 0
    all_moments = num_moments * _BYTES[moments]
    return BytesPerParameter(
        weights=weights,
        extra=extra,
        moments=all_moments,
        gradients=4 if accumulates else gradients,
        casts=casts,
        snapshot=weights + extra + all_moments,
        best=weights,
    )


# -- scaler ----------------------------------------------------------------------------------------
# The dynamic loss scale, as plain numbers.
#
# FP16 gradients below 6e-8 are zero and above 65,504 infinite. Multiplying the loss by a power of two moves them into
# the middle. The scale falls at once when something overflows and rises slowly when nothing does.


@dataclass(frozen=True)
class LossScale:
    """State in, state out: `after_overflow` and `after_good_step` return the next state."""

    scale: float = 65536.0
    good_steps: int = 0
    growth_steps: int = 2000
    floor: float = 1.0
    ceiling: float = 2.0**24

    def after_overflow(self) -> LossScale:
        return replace(self, scale=max(self.scale / 2, self.floor), good_steps=0)

    def after_good_step(self) -> LossScale:
        if self.good_steps + 1 < self.growth_steps:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=min(self.scale * 2, self.ceiling), good_steps=0)

    @property
    def is_at_floor(self) -> bool:
        return self.scale <= self.floor


# -- cpu half matmul -------------------------------------------------------------------------------
# FP16 matrix products on a CPU: FP16 in, FP32 inside, FP16 out.
#
# A CPU without native FP16 arithmetic multiplies half matrices up to 28 times slower than FP32 ones. A GPU reads
# FP16, accumulates in FP32 and rounds once; doing the same with an FP32 product gives the same numbers as the GPU
# would (up to the order of summation) at FP32 speed, which makes the FP16 policies testable and usable without a
# GPU.


_PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.baddbmm.default,
    }
)


class HalfProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """While active, products of FP16 tensors are computed in FP32 and rounded once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and args[-1].dtype == torch.float16:
            wide = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
            return func(*wide, **(kwargs or {})).to(torch.float16)
        return func(*args, **(kwargs or {}))


class Precision:
    """FP32 throughout."""

    mode = "fp32"
    compute_dtype: torch.dtype | None = None
    scales_loss = False
    keeps_half_weights = False
    matrix_storage: Callable[[nn.Parameter], Storage] = Direct

    def __init__(self, device: torch.device, reason: str, config: PrecisionConfig | None = None) -> None:
        config = config or PrecisionConfig()
        self.device = device
        self.reason = reason
        self.moment_dtype: torch.dtype = getattr(torch, config.moments)
        self.scaler = LossScale(scale=config.initial_loss_scale, growth_steps=config.loss_scale_growth_steps)

    # -- what the step calls -----------------------------------------------------------------------------

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Around the forward pass."""
        with ExitStack() as stack:
            if self.compute_dtype is not None:
                stack.enter_context(torch.autocast(self.device.type, dtype=self.compute_dtype))
            stack.enter_context(self.half_products())
            yield

    @property
    def emulates_half(self) -> bool:
        """Whether FP16 products are computed in FP32 and rounded."""
        return self.uses_half and self.device.type == "cpu"

    @property
    def uses_half(self) -> bool:
        """Whether the student's products have FP16 operands."""
        return self.compute_dtype == torch.float16 or self.keeps_half_weights

    @contextmanager
    def half_products(self) -> Iterator[None]:
        """FP16 products with FP32 sums: by way of FP32 where the device has no fast ones."""
        if self.emulates_half:
            with HalfProducts():  # type: ignore[no-untyped-call]
                yield
        elif self.uses_half:
            with wide_sums(self.device):
                yield
        else:
            yield

    def backward(self, loss: Tensor) -> None:
        with self.half_products():
            (loss * self.loss_scale).backward()  # type: ignore[no-untyped-call]

    def squared_norms(self, optimizer: AdamW) -> dict[str, Tensor]:
        """Squared norms of the *scaled* gradients, on the device."""
        return optimizer.squared_norms()

    def step(
        self, optimizer: AdamW, rate_factor: float, clip_factors: Mapping[str, float], *, is_sampled: bool = False
    ) -> dict[str, Tensor]:
        """Unscale, clip and apply. The caller has seen that the gradients are finite.

        A sampled step also says, on the device, how much of the update arrived.
        """
        inverse = 1.0 / self.loss_scale
        factors = {name: inverse * factor for name, factor in clip_factors.items()}
        sampled: dict[str, Tensor] = {}
        if is_sampled:
            sampled = optimizer.sampled_step(rate_factor, factors)
        else:
            optimizer.step(rate_factor, factors)
        if self.scales_loss:
            self.scaler = self.scaler.after_good_step()
        return sampled

    def back_off(self) -> None:
        """Something overflowed: try again with a smaller scale."""
        if self.scales_loss:
            self.scaler = self.scaler.after_overflow()

    def start_at(self, scale: float) -> None:
        """Begin with a scale that a probe found, without counting a good or bad step."""
        self.scaler = replace(self.scaler, scale=scale, good_steps=0)

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale if self.scales_loss else 1.0

    # -- what the builder calls --------------------------------------------------------------------------

    def optimizer(
        self, groups: Sequence[ParameterGroup], train: TrainConfig, formats: Mapping[str, str] | None = None
    ) -> AdamW:
        """`formats`: the block format of each parameter that is rounded as a file would round it."""

        def store(name: str, parameter: nn.Parameter) -> Storage:
            kind = (formats or {}).get(name, "float32")
            return self._storage(name, parameter) if kind == "float32" else Rounded(parameter, kind)

        optimizer = AdamW(
            groups,
            store=store,
            moment_dtype=self.moment_dtype,
            betas=(train.beta1, train.beta2),
            epsilon=train.epsilon,
            weight_decay=train.weight_decay,
            momentum=train.momentum,
            seed=train.seed,
        )
        if self.keeps_half_weights and train.gradient_accumulation_steps > 1:
            optimizer.accumulate_in_fp32()
        return optimizer

    def _storage(self, name: str, parameter: nn.Parameter) -> Storage:
        """Vectors (norm gains, biases) and routers keep FP32 masters in every FP16 mode: they are tiny, and
        a gain of 1.0 in FP16 does not notice an update below 0.0005. Projectors are parts of objectives: FP32."""
        if not self.keeps_half_weights or name.startswith("projectors."):
            return Direct(parameter)
        if hasattr(parameter, "to_local"):  # it is sharded
            return Gathered(parameter)
        if parameter.ndim < 2 or name.startswith("router."):
            return Master(parameter)
        return type(self).matrix_storage(parameter)

    def frozen_storage(self, asked: str = "auto") -> torch.dtype | str:
        """The dtype or block format of matrices that are not trained: what was asked, or what is multiplied in.

        With FP16 weights activations are FP16, so such a policy cannot have others next to them.
        """
        own = torch.float16 if self.keeps_half_weights else self.compute_dtype or torch.float32
        dtype: torch.dtype | str = (
            own if asked == "auto" else asked if asked in (*FORMATS, "nf4") else getattr(torch, asked)
        )
        if self.keeps_half_weights and dtype != own:
            raise ConfigError(
                f"{self.mode} computes with FP16 weights and cannot have a base in {asked}",
                where="student.adapter.base_dtype",
                advice=["--set student.adapter.base_dtype=float16", "--precision fp32", "--precision fp16-mixed"],
            )
        return dtype

    def plain(self) -> Precision:
        """FP32 on the same device: for models that this policy does not train."""
        return Precision(self.device, "not trained")

    # -- state -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "scale": self.scaler.scale,
            "good_steps": self.scaler.good_steps,
            "device": self.device.type,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["mode"] != self.mode:
            raise ValueError(f"the checkpoint was written in {state['mode']}, this run uses {self.mode}")
        self.scaler = LossScale(
            scale=float(state["scale"]),
            good_steps=int(state["good_steps"]),
            growth_steps=self.scaler.growth_steps,
            floor=self.scaler.floor,
        )


class Bf16Mixed(Precision):
    """FP32 weights, BF16 products. BF16 has FP32's range, so nothing needs scaling."""

    mode = "bf16-mixed"
    compute_dtype = torch.bfloat16


class Fp16Mixed(Precision):
    """FP32 weights, FP16 products, scaled loss."""

    mode = "fp16-mixed"
    compute_dtype = torch.float16
    scales_loss = True


class Fp16Master(Precision):
    """FP16 weights with FP32 masters, scaled loss."""

    mode = "fp16-master"
    scales_loss = True
    keeps_half_weights = True
    matrix_storage: Callable[[nn.Parameter], Storage] = Master


class Fp16Split(Fp16Master):
    """FP16 weights with FP16 residuals instead of masters: two bytes less a parameter."""

    mode = "fp16-split"
    matrix_storage = Split


class Fp16Stochastic(Fp16Master):
    """FP16 weights alone, stochastically rounded: four bytes less a parameter."""

    mode = "fp16-sr"
    matrix_storage = Stochastic


POLICIES: dict[str, type[Precision]] = {
    policy.mode: policy for policy in (Precision, Bf16Mixed, Fp16Mixed, Fp16Master, Fp16Split, Fp16Stochastic)
}


# -- resolve ---------------------------------------------------------------------------------------
# Which precision to train in, and the reason in a sentence.


# Student state alone; the rest of the GPU belongs to the teacher, activations and the head.
_STATE_SHARE = 0.5

# How many times as fast a CPU's products have to be in BF16: what is not a product is cast to and fro.
_LEAST_BF16_GAIN = 1.3

_WHY_ASKED = {
    "fp32": "FP32 throughout, no loss scaling",
    "bf16-mixed": "FP32 weights, BF16 products, no loss scaling needed",
    "fp16-mixed": "FP32 weights, FP16 products, scaled loss",
    "fp16-master": "FP16 weights with FP32 masters, scaled loss",
    "fp16-split": "FP16 weights with FP16 residuals, scaled loss",
    "fp16-sr": "FP16 weights rounded stochastically, scaled loss",
}


def needs_fp32_weights(config: Config) -> bool:
    """Whether FP16 weights would be refused: blocks round FP32, adapters are FP32, sar-meta steps are small."""
    student = config.student
    return student.adapter is not None or bool(student.quantise) or config.teacher.router.mode == "sar-meta"


def choose(
    mode: str,
    facts: DeviceFacts,
    num_parameters: int = 0,
    *,
    moments: Moments = "float32",
    num_by_muon: int = 0,
    begun_in: str = "",
    is_wide: bool = False,
) -> tuple[str, str]:
    """(mode, reason) for what was asked on a device: a pure decision.

    `num_parameters` counts everything that is trained, routers included; `num_by_muon` of them have one moment.
    `begun_in` is the mode of a run that is continued: `auto` is not resolved again, because the saved state is of that
    mode. `is_wide`: `needs_fp32_weights`.
    """
    wanted = begun_in or mode
    if wanted != "auto" and wanted not in _WHY_ASKED:
        raise ConfigError(f"there is no precision {wanted!r}", advice=[f"modes: auto, {', '.join(_WHY_ASKED)}"])
    if num_parameters < 0:
        raise ConfigError(f"{num_parameters} parameters cannot be trained", where="num_parameters")
    if begun_in:
        return _asked(begun_in, facts, why="the run began in it", advice=["--device cpu", "a GPU with native bf16"])
    if mode != "auto":
        return _asked(mode, facts, why="asked for", advice=["--precision fp16-mixed", "--precision auto"])
    if facts.kind == "cpu" and facts.bf16_gain >= _LEAST_BF16_GAIN:
        return "bf16-mixed", f"no GPU, and the CPU has BF16 units. {facts.measured}"
    if facts.kind == "cpu":
        told = f" ({facts.measured})" if facts.measured else ""
        return "fp32", f"no GPU: FP32 is the fastest exact choice on a CPU{told}"
    if facts.kind != "cuda":
        return "fp32", f"{facts.name}: FP16 training was never tried on it"
    if facts.has_native_bf16:
        return "bf16-mixed", f"{facts.name} has native bf16: FP32 weights, BF16 products, no loss scaling needed"
    # FP16 weights are read in half the bytes and need no cast in each forward; a step is modelled to be faster.
    half = "fp16-mixed" if is_wide else "fp16-master"
    fast = half if facts.has_tensor_cores else "fp32"
    held = bytes_per_parameter(fast, moments)
    needed, room = (
        num_parameters * held.on_device - num_by_muon * held.moments // 2,
        int(facts.memory_bytes * _STATE_SHARE),
    )
    if needed > room:
        return (
            "fp16-split",
            f"{facts.name} has no native bf16, and {needed / 1e9:.1f} GB of {fast} training state would not leave room "
            f"on {facts.memory_bytes / 1e9:.0f} GB: FP16 weights with FP16 residuals, scaled loss",
        )
    if not facts.has_tensor_cores:
        return "fp32", f"{facts.name} has no tensor cores: FP16 products would be no faster than FP32"
    return half, f"{facts.name} has no native bf16: {_WHY_ASKED[half]}"


def _asked(mode: str, facts: DeviceFacts, *, why: str, advice: list[str]) -> tuple[str, str]:
    """A mode that is not ours to choose."""
    if mode == "bf16-mixed" and facts.kind == "cuda" and not facts.has_native_bf16:
        raise ConfigError(f"{mode}: {why}, and {facts.name} has no native bf16", where="precision.mode", advice=advice)
    said = f"{why}: {_WHY_ASKED[mode]}"
    if facts.kind == "cpu" and mode.startswith("fp16"):
        said += "; on a CPU FP16 products are computed in FP32 and rounded"
    return mode, said


def resolve(
    mode: str = "auto",
    device: str | torch.device = "cpu",
    *,
    config: PrecisionConfig | None = None,
    num_parameters: int = 0,
    num_by_muon: int = 0,
    begun_in: str = "",
    facts: DeviceFacts | None = None,
    is_wide: bool = False,
) -> Precision:
    """The policy for a mode on a device; `.mode` and `.reason` say what was chosen and why.

    `facts` are those of the device where more is known of it than its kind: a CPU is in FP32 unless its BF16 products
    were measured.
    """
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise BrokenAtStart(f"there is no device {device!r}", advice=["use cpu, cuda or cuda:1"]) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BrokenAtStart(f"torch sees no {device}", advice=["use cpu", "check the driver with nvidia-smi"])
    facts = facts or facts_of(device)
    check_device(facts)
    moments = config.moments if config else "float32"
    chosen, reason = choose(
        mode, facts, num_parameters, moments=moments, num_by_muon=num_by_muon, begun_in=begun_in, is_wide=is_wide
    )
    return POLICIES[chosen](device, reason, config)
