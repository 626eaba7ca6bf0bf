"""The optimizer: few kernels however many tensors there are, and the same bits as tensor by tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.utils._python_dispatch import TorchDispatchMode

from stillroom.config.schema import PrecisionConfig, TrainConfig
from stillroom.precision import AdamW, ParameterGroup, resolve, storage
from stillroom.precision.policy import POLICIES

VIEWS = {"view", "detach", "split", "split_with_sizes", "empty", "unbind", "alias", "select", "slice", "_unsafe_view"}


class Kernels(TorchDispatchMode):
    """Counts the operations that a GPU would be given a kernel for; one over a list of tensors is one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def made(mode: str, moments: str, num_layers: int, *, seed: int = 0) -> tuple[AdamW, list[nn.Parameter]]:
    """Nine tensors a layer, as in a Llama, and gradients for all of them."""
    generator = torch.Generator().manual_seed(seed)
    named = []
    for layer in range(num_layers):
        for part in range(7):
            named.append((f"{layer}.matrix{part}", nn.Parameter(0.02 * torch.randn(6, 4 + part, generator=generator))))
        named += [(f"{layer}.gain{part}", nn.Parameter(torch.ones(5))) for part in range(2)]
    precision = resolve(mode, config=PrecisionConfig(moments=moments))  # type: ignore[arg-type]
    optimizer = precision.optimizer([ParameterGroup("student", 1e-2, tuple(named))], TrainConfig())
    give_gradients([parameter for _name, parameter in named], generator)
    return optimizer, [parameter for _name, parameter in named]


def give_gradients(parameters: list[nn.Parameter], generator: torch.Generator) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("mode", list(POLICIES))
def test_an_update_takes_no_more_kernels_for_more_tensors(mode: str, moments: str) -> None:
    counts = []
    for num_layers in (2, 30):
        optimizer, _parameters = made(mode, moments, num_layers)
        with Kernels() as seen:
            optimizer.step(1.0, {"student": 1.0})
        counts.append(len(seen.names))
    assert counts[0] == counts[1] <= 100, counts


def test_an_update_without_scratch_is_one_bucket_however_large_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillroom.precision.adamw._SCRATCH_BYTES", 64)
    optimizer, _parameters = made("fp32", "float32", 8)
    with Kernels() as seen:
        optimizer.step(1.0, {"student": 1.0})
    assert seen.names.count("_fused_adamw_") == 2, "one for what is decayed and one for what is not"
    split, _parameters = made("fp16-split", "float32", 8)
    with Kernels() as bounded:
        split.step(1.0, {"student": 1.0})
    assert bounded.names.count("_fused_adamw_") > 8, "scratch is bounded"


def tensor_by_tensor(optimizer: AdamW) -> None:
    """The same update in the plainest way: each tensor read, updated, rounded and written by itself."""
    generator = torch.Generator().manual_seed((optimizer.seed * 1_000_003 + optimizer.num_updates) & (2**63 - 1))
    for cell in sorted(optimizer.cells["student"], key=lambda cell: cell.decay):
        assert cell.gradient is not None and cell.second is not None
        weight = cell.storage.read()
        held = [(one, type(one).read_all([one])) for one in (cell.first, cell.second)]
        first, second = (values.parts[0] for _one, values in held)
        adamw(
            [weight], [cell.gradient.float() * 0.5], [first], [second], [], [cell.num_updates], fused=True,
            amsgrad=False, beta1=optimizer.betas[0], beta2=optimizer.betas[1], lr=1e-2, weight_decay=cell.decay,
            eps=optimizer.epsilon, maximize=False,
        )  # fmt: skip
        match type(cell.storage).__name__:
            case "Master":
                cell.parameter.data.copy_(weight)
            case "Split":
                coarse, residual = storage.split(weight)
                cell.parameter.data.copy_(coarse)
                cell.storage.extra()["residual"].copy_(residual)
            case "Stochastic":
                cell.parameter.data.copy_(storage.stochastic_fp16(weight, generator))
        for moment, values in held:
            bits = storage.random_bits(moment.draws, storage.BF16_BITS, generator, weight.device)
            type(moment).write_all([moment], values, bits if moment.draws else None)
    optimizer.num_updates += 1


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("mode", list(POLICIES))
def test_many_at_a_time_gives_the_bits_of_one_at_a_time(mode: str, moments: str) -> None:
    (together, ours), (alone, theirs) = made(mode, moments, 3), made(mode, moments, 3)
    for step in range(4):
        together.step(1.0, {"student": 0.5})
        with torch.no_grad():
            tensor_by_tensor(alone)
        for parameters in (ours, theirs):
            give_gradients(parameters, torch.Generator().manual_seed(step))
    for mine, wanted in zip(state(together, ours), state(alone, theirs), strict=True):
        assert torch.equal(mine, wanted)


def state(optimizer: AdamW, parameters: list[nn.Parameter]) -> list[Tensor]:
    return [*(parameter.data for parameter in parameters), *optimizer.tensors().values()]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_what_it_is(value: float) -> None:
    """A NaN whose bits are all ones would become minus zero if random bits were added to it."""
    odd = torch.tensor([value, value])
    odd[1:].view(torch.int32).bitwise_or_(0x7FFFFF if value != value else 0)
    for round_ in (storage.stochastic_fp16, storage.stochastic_bf16):
        assert torch.equal(round_(odd, torch.Generator().manual_seed(0)).float(), odd) or value != value
        assert not torch.isfinite(round_(odd, torch.Generator().manual_seed(0))).any()
