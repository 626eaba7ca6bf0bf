"""Trials of every precision policy: what its products, its gradients and its updates lose against float64."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from stillroom.checks import textbook
from stillroom.checks.selftest.cases import draw
from stillroom.checks.selftest.trial import Measured, NotHere, Trial, away, worst
from stillroom.config.schema import PrecisionConfig
from stillroom.config.train import TrainConfig
from stillroom.errors import ConfigError
from stillroom.precision import AdamW, LossScale, ParameterGroup, Precision, resolve, rounding
from stillroom.precision.policy import POLICIES

GROUP = "precision"
_TRAIN = TrainConfig(weight_decay=0.1)
_SIZE = 48
# What rounding to a dtype costs a product and its gradient, with room for their sums.
_PRODUCTS = {"fp32": 1e-5, "bf16-mixed": 3e-2}
_HALF_PRODUCTS = 4e-3
# What is lost of the way that thirty updates go: FP32 sums, 22 bits, FP16 rounded stochastically.
_WAYS = {"fp32": 1e-4, "bf16-mixed": 1e-4, "fp16-mixed": 1e-4, "fp16-master": 1e-4, "fp16-split": 1e-3, "fp16-sr": 5e-2}
_BF16_MOMENTS = 3e-2  # rounded stochastically to 8 bits
_SMALL_RATE, _SMALL_STEPS = 5e-6, 120  # updates below half of FP16's spacing at weights of 0.02
_SMALL_LOSS = 0.03  # of the mean way of 2,304 weights


def trials(device: torch.device) -> list[Trial]:
    where = "" if device.type == "cpu" else f" on {device}"
    made = []
    for mode in POLICIES:
        made.append(Trial(GROUP, f"{mode}{where}: products", functools.partial(_products, mode, device)))
        for moments in ("float32", "bfloat16"):
            measure = functools.partial(_updates, mode, moments, device)
            made.append(Trial(GROUP, f"{mode}{where}: updates, {moments} moments", measure))
        made.append(Trial(GROUP, f"{mode}{where}: updates at 5e-6", functools.partial(_small_updates, mode, device)))
    if device.type == "cpu":
        made += [Trial(GROUP, "rounding to two bytes", _rounding), Trial(GROUP, "loss scale", _loss_scale)]
    return made


def _policy(mode: str, device: torch.device, moments: str = "float32") -> Precision:
    try:
        return resolve(mode, device, config=PrecisionConfig.model_validate({"moments": moments}))
    except ConfigError as error:
        raise NotHere(error.what) from None


def _products(mode: str, device: torch.device) -> Measured:
    """A product and both its gradients, the loss scaled; a tiny loss among them, which FP16 cannot hold unscaled."""
    precision = _policy(mode, device)
    parts = []
    for size in (1e-3, 1e-8):
        weight = nn.Parameter(draw(0, _SIZE, _SIZE, spread=0.2, dtype=torch.float32).to(device))
        precision.optimizer([ParameterGroup("student", 1e-3, (("matrix", weight),))], _TRAIN)  # stores it as it does
        x = draw(1, 16, _SIZE, spread=1.0, dtype=torch.float32).to(device)
        upstream = draw(2, 16, _SIZE, spread=size).float().to(device)
        with precision.autocast():
            y = (x.to(weight.dtype) @ weight.T).float()
        precision.backward((y * upstream).sum())
        assert weight.grad is not None
        exact = weight.detach().double().cpu()
        bound = _PRODUCTS.get(mode, _HALF_PRODUCTS)
        expected = upstream.double().cpu().T @ x.double().cpu()
        own = weight.grad.double() / precision.loss_scale
        parts.append(Measured(away(y, x.double().cpu() @ exact.T), bound, "a product"))
        parts.append(Measured(away(own, expected), bound, f"the gradient of a loss of size {size:g}"))
    return worst(*parts)


def _trained(precision: Precision, weight: Tensor, gradients: list[Tensor], rate: float) -> Tensor:
    """A matrix after an update for each gradient, as the policy stores it."""
    parameter = nn.Parameter(weight.float().to(precision.device))
    group = ParameterGroup("student", rate, (("matrix", parameter),))
    optimizer: AdamW = precision.optimizer([group], _TRAIN)
    for gradient in gradients:
        parameter.grad = gradient.to(precision.device, parameter.dtype)
        optimizer.step(1.0, {"student": 1.0})
    return optimizer.cells["student"][0].storage.read().double().cpu()


def _expected(weight: Tensor, gradients: list[Tensor], rate: float) -> Tensor:
    betas = _TRAIN.beta1, _TRAIN.beta2
    return textbook.adamw(weight, gradients, rate=rate, betas=betas, epsilon=_TRAIN.epsilon, decay=_TRAIN.weight_decay)


def _updates(mode: str, moments: str, device: torch.device) -> Measured:
    precision = _policy(mode, device, moments)
    weight = draw(0, _SIZE, _SIZE, spread=0.02).half().double()  # every storage can hold it
    gradients = [draw(10 + step, _SIZE, _SIZE, spread=1.0).half().float() for step in range(30)]
    own = _trained(precision, weight, gradients, 1e-3)
    expected = _expected(weight, gradients, 1e-3)
    bound = _WAYS[mode] if moments == "float32" else max(_BF16_MOMENTS, _WAYS[mode])
    return Measured(away(own - weight, expected - weight), bound, "the way the weights went")


def _small_updates(mode: str, device: torch.device) -> Measured:
    """Updates that rounding to nearest would lose one by one arrive in the mean."""
    precision = _policy(mode, device)
    weight = draw(0, _SIZE, _SIZE, spread=0.02).half().double()
    pull = draw(1, _SIZE, _SIZE, spread=1.0).sign().float()
    gradients = [pull] * _SMALL_STEPS
    own = _trained(precision, weight, gradients, _SMALL_RATE) - weight
    expected = _expected(weight, gradients, _SMALL_RATE) - weight
    arrived = float((own * expected).sum() / expected.pow(2).sum())
    return Measured(abs(arrived - 1.0), _SMALL_LOSS, "the share of small updates that arrived")


def _rounding() -> Measured:
    values = torch.tensor([1.0003, -0.02, 3e-7, 40000.0, 6e-5])
    many = values.repeat(20_000, 1)
    generator = torch.Generator().manual_seed(0)
    joined = rounding.join(*rounding.split(values))
    means = {
        "FP16": rounding.stochastic_fp16(many, generator).double().mean(0),
        "BF16": rounding.stochastic_bf16(many, generator).double().mean(0),
    }
    parts = [
        Measured(float(((mean - values.double()) / values.double()).abs().max()), 5e-3, f"the mean of {name}")
        for name, mean in means.items()
    ]
    return worst(Measured(float(((joined - values) / values).abs().max()), 2e-3, "a value in two halves"), *parts)


def _loss_scale() -> Measured:
    """Halved by each overflow down to the floor, doubled after so many good steps."""
    scale, seen = LossScale(scale=16.0, growth_steps=3, floor=2.0), []
    for overflowed in (False, False, False, True, True, True, True, False, False, False):
        scale = scale.after_overflow() if overflowed else scale.after_good_step()
        seen.append(scale.scale)
    wrong = sum(own != wanted for own, wanted in zip(seen, (16, 16, 32, 16, 8, 4, 2, 2, 2, 4), strict=True))
    return Measured(float(wrong), 0.5, "the scale after an overflow")
