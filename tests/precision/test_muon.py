"""Muon: against float64 singular values, torch's own, and over every storage."""

from __future__ import annotations

import math

import pytest
import torch
from test_adamw import Kernels, give_gradients
from torch import Tensor, nn

from stillroom.config.schema import PrecisionConfig, TrainConfig
from stillroom.precision import AdamW, ParameterGroup, resolve
from stillroom.precision.muon import longest_step, orthogonalised, scale_of
from stillroom.precision.policy import POLICIES

SHAPES = [(24, 24), (12, 40), (40, 12), (3, 16, 8)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(
    mode: str = "fp32", moments: str = "float32", num: int = 1, **train: float
) -> tuple[AdamW, list[nn.Parameter]]:
    """Matrices of every shape for Muon, a table and a gain for AdamW."""
    named = [
        (f"{number}.{place}", nn.Parameter(0.02 * drawn(*shape, seed=place)))
        for number in range(num)
        for place, shape in enumerate(SHAPES)
    ]
    by_muon = frozenset(name for name, _parameter in named)
    named += [("table", nn.Parameter(0.02 * drawn(32, 16, seed=9))), ("gain", nn.Parameter(torch.ones(16)))]
    precision = resolve(mode, config=PrecisionConfig(moments=moments))  # type: ignore[arg-type]
    group = ParameterGroup("student", 1e-2, tuple(named), by_muon=by_muon)
    optimizer = precision.optimizer([group], TrainConfig(**train))  # type: ignore[arg-type]
    return optimizer, [parameter for _name, parameter in named]


def polynomial(values: Tensor) -> Tensor:
    """What the iteration does to a singular value, in float64."""
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


@pytest.mark.parametrize("shape", [(1, 24, 24), (2, 12, 40), (2, 40, 12)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_directions_stay_and_singular_values_are_near_one(shape: tuple[int, ...], size: float) -> None:
    matrices = size * drawn(*shape)
    left, values, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    expected = left @ torch.diag_embed(polynomial(values)) @ right
    found = orthogonalised(matrices).double()
    assert float((found - expected).abs().max()) < 1e-4
    within = torch.linalg.svdvals(found)[values > 0.01]
    assert float(within.min()) > 0.67 and float(within.max()) < 1.21


@pytest.mark.parametrize("shape", [(48, 48), (24, 96), (96, 24), (5, 24, 96)])
def test_an_update_has_a_fifth_of_the_rate_in_every_shape(shape: tuple[int, ...]) -> None:
    moved = scale_of(shape) * orthogonalised(drawn(*shape).view(-1, *shape[-2:]))
    narrow, wide = sorted(shape[-2:])
    assert float(moved.square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)
    assert scale_of(shape) == pytest.approx(0.2 * math.sqrt(wide)) and narrow <= wide
    assert float(moved.abs().max()) <= longest_step(shape)


def test_no_matrix_is_moved_further_than_its_longest_step() -> None:
    """A momentum of rank one has all of its length in one singular value."""
    spike = torch.zeros(1, 16, 16)
    spike[0, 3, 5] = 1e3
    assert float(scale_of((16, 16)) * orthogonalised(spike).abs().max()) <= longest_step((16, 16))


def test_no_gradient_moves_nothing() -> None:
    assert not orthogonalised(torch.zeros(2, 4, 6)).any()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_updates_are_those_of_torch() -> None:
    """Which iterates in BF16: its singular values are off by a few per cent, its directions are ours."""
    optimizer, parameters = made(weight_decay=0.1)
    ours = parameters[:3]  # torch takes no experts in one tensor
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    start = [parameter.detach().clone() for parameter in ours]
    peer = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(10):
        give_gradients(parameters, torch.Generator().manual_seed(step))
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = mine.grad.clone()  # type: ignore[union-attr]
        optimizer.step(1.0, {"student": 1.0})
        peer.step()
    for mine, other, begin in zip(ours, theirs, start, strict=True):
        way, expected = (mine.detach() - begin), (other.detach() - begin)
        assert float((way - expected).norm() / expected.norm()) < 0.03


def test_every_expert_is_a_matrix() -> None:
    together, (experts,) = nn.Parameter(drawn(3, 8, 6)), [[nn.Parameter(one) for one in drawn(3, 8, 6).unbind()]]
    stacked = resolve("fp32").optimizer(
        [ParameterGroup("student", 1e-2, (("all", together),), by_muon=frozenset({"all"}))], TrainConfig()
    )
    named = tuple((str(number), one) for number, one in enumerate(experts))
    apart = resolve("fp32").optimizer(
        [ParameterGroup("student", 1e-2, named, by_muon=frozenset(dict(named)))], TrainConfig()
    )
    for step in range(3):
        gradient = drawn(3, 8, 6, seed=step)
        together.grad = gradient.clone()
        for one, part in zip(experts, gradient.unbind(), strict=True):
            one.grad = part.clone()
        for optimizer in (stacked, apart):
            optimizer.step(1.0, {"student": 1.0})
    assert torch.equal(together, torch.stack(list(experts)))


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("mode", list(POLICIES))
def test_every_storage_goes_the_way_of_fp32(mode: str, moments: str) -> None:
    ways = []
    for optimizer, parameters in (made(), made(mode, moments)):
        start = [cell.storage.read().clone() for cell in optimizer.cells["student"]]
        for step in range(20):
            give_gradients(parameters, torch.Generator().manual_seed(step))
            optimizer.step(1.0, {"student": 0.5})
        pairs = zip(optimizer.cells["student"], start, strict=True)
        ways.append([(cell.storage.read() - begin).flatten() for cell, begin in pairs])
    for expected, way in zip(*ways, strict=True):
        assert float((way * expected).sum() / expected.square().sum()) == pytest.approx(1.0, abs=0.05)


def test_an_update_takes_no_more_kernels_for_more_matrices() -> None:
    counts = []
    for num in (2, 20):
        optimizer, parameters = made(num=num)
        give_gradients(parameters, torch.Generator().manual_seed(0))
        with Kernels() as seen:
            optimizer.step(1.0, {"student": 1.0})
        counts.append(len(seen.names))
    assert counts[0] == counts[1], counts


def test_a_matrix_of_muon_keeps_one_moment() -> None:
    optimizer, parameters = made()
    kept = optimizer.tensors()
    assert {f"0.{place}.first" for place in range(len(SHAPES))} < set(kept)
    assert sorted(name for name in kept if name.endswith(".second")) == ["gain.second", "table.second"]
    assert optimizer.longest_muon_step == longest_step((40, 12))
    assert len(parameters) == len(optimizer.cells["student"])


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("mode", list(POLICIES))
def test_seven_updates_are_three_and_four_from_a_checkpoint(mode: str, moments: str) -> None:
    """To the last bit, Muon's matrices and AdamW's, with weights and moments rounded as they are."""
    whole, first = made(mode, moments), made(mode, moments)
    again = made(mode, moments)
    for step in range(7):
        if step == 3:
            for parameter, saved in zip(again[1], first[1], strict=True):
                parameter.data.copy_(saved.data)
            again[0].num_updates = first[0].num_updates
            again[0].load_tensors({name: tensor.clone() for name, tensor in first[0].tensors().items()})
        for optimizer, parameters in (whole, first if step < 3 else again):
            give_gradients(parameters, torch.Generator().manual_seed(step))
            optimizer.step(1.0, {"student": 1.0})
    for mine, wanted in zip(again[1], whole[1], strict=True):
        assert torch.equal(mine, wanted)
    for name, tensor in whole[0].tensors().items():
        assert torch.equal(again[0].tensors()[name], tensor), name
