"""Precision policies: the only code that knows about dtypes, loss scaling and master weights.

The base class is FP32 and does nothing; each mode overrides what it changes. The training step calls the
same five methods whatever the mode, so it never mentions a scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.config.schema import PrecisionConfig
from stillroom.config.train import TrainConfig
from stillroom.errors import ConfigError
from stillroom.precision.adamw import AdamW, ParameterGroup
from stillroom.precision.cpu_half_matmul import HalfProducts
from stillroom.precision.scaler import LossScale
from stillroom.precision.storage import Direct, Gathered, Master, Split, Stochastic, Storage


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
        self.moment_dtype = torch.bfloat16 if config.moments == "bfloat16" else torch.float32
        self.scaler = LossScale(
            scale=config.initial_loss_scale, growth_steps=config.loss_scale_growth_steps, floor=config.min_loss_scale
        )

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
        uses_half = self.compute_dtype == torch.float16 or self.keeps_half_weights
        return uses_half and self.device.type == "cpu"

    @contextmanager
    def half_products(self) -> Iterator[None]:
        """FP16 products by way of FP32 where the device has no fast ones."""
        if self.emulates_half:
            with HalfProducts():  # type: ignore[no-untyped-call]
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
        """Begin with a scale that was found by a probe; nothing is counted as good or bad by it."""
        self.scaler = replace(self.scaler, scale=scale, good_steps=0)

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale if self.scales_loss else 1.0

    # -- what the builder calls --------------------------------------------------------------------------

    def optimizer(self, groups: Sequence[ParameterGroup], train: TrainConfig) -> AdamW:
        optimizer = AdamW(
            groups,
            store=self._storage,
            moment_dtype=self.moment_dtype,
            betas=(train.beta1, train.beta2),
            epsilon=train.epsilon,
            weight_decay=train.weight_decay,
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

    def frozen_storage(self, asked: str = "auto") -> torch.dtype:
        """The dtype of matrices that are not trained: what was asked, or what is multiplied in.

        With FP16 weights activations are FP16, so such a policy cannot have others beside them.
        """
        own = torch.float16 if self.keeps_half_weights else self.compute_dtype or torch.float32
        dtype: torch.dtype = own if asked == "auto" else getattr(torch, asked)
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
