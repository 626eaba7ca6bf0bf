"""AdamW as one Triton launch: a T4's PTX executed on a CPU, and who is given it. No GPU is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
from ptx_cases import T4, AdamCase
from ptx_launch import build, resources

from stillroom.precision import adamw, adamw_triton

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize("is_half", [False, True])
def test_the_update_is_float64_to_rounding_and_has_no_race(is_half: bool) -> None:
    case = AdamCase(is_half=is_half)
    run = case.executed(slots=2, schedule="random")
    assert not run.races
    assert case.error() < 1e-6
    for weight, half in zip(case.weights, case.halves, strict=False):
        assert torch.equal(half, weight.half())


@pytest.mark.parametrize("is_half", [False, True])
def test_a_parameter_moves_28_bytes(is_half: bool) -> None:
    case = AdamCase(is_half=is_half, sizes=(65_536,))
    run = case.executed(checks=False)
    assert (run.bytes_read() + run.bytes_written()) / case.num_parameters == pytest.approx(28.0, rel=0.02)


@pytest.mark.parametrize("architecture", [60, 70, T4, 80, 89])
def test_ptxas_builds_the_update_without_spills(architecture: int, tmp_path: Path) -> None:
    for is_half in (False, True):
        held = resources(build(AdamCase(is_half=is_half).launch, architecture), tmp_path)
        assert held["spilled_bytes"] == 0
        assert held["registers"] <= 64  # 1,024 threads a multiprocessor


def test_a_size_one_off_is_seen() -> None:
    case = AdamCase(is_half=False)
    case.launch.arguments["sizes"] = case.launch.arguments["sizes"] + 1
    with pytest.raises(IndexError):
        case.executed()


@pytest.mark.parametrize("count", [1.0, 2.0, 10.0, 1000.0])
def test_corrections_of_the_first_updates_keep_their_digits(count: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdamCase, "COUNT", count)
    monkeypatch.setattr(AdamCase, "BETAS", (0.9, 0.999))
    case = AdamCase(is_half=False, sizes=(1024,))
    case.executed(checks=False)
    assert case.error() < 1e-6


def aligned(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype)


def test_what_the_kernel_does_not_serve_keeps_torchs_update() -> None:
    one = [aligned(64)]
    assert adamw_triton.serves(one, one, one, [])
    assert adamw_triton.serves(one, [aligned(64, torch.float16)], one, [aligned(64, torch.float16)])
    assert not adamw_triton.serves(one, [aligned(64, torch.bfloat16)], one, [])
    assert not adamw_triton.serves(one, one, [aligned(64, torch.bfloat16)], [])
    assert not adamw_triton.serves(one, [aligned(65)[1:]], one, [])
    assert not adamw_triton.serves(one, [aligned(64), aligned(64, torch.float16)], one, [])
    assert not adamw.choose_update(CPU).is_at_once


class Launched:
    """Stands in for a launch: does by torch what the kernel does by PTX."""

    def __init__(self, *held: Any, factor: float, spoil: float = 1.0, **options: Any) -> None:
        self._held, self._factor, self._spoil, self._options = held, factor, spoil, options

    def start(self) -> None:
        weights, gradients, firsts, seconds, halves, counts = self._held
        scaled = [one.float() * self._factor * self._spoil for one in gradients]
        adamw._fused_update(weights, scaled, firsts, seconds, [one - 1 for one in counts], **self._options)
        if halves:
            torch._foreach_copy_(list(halves), list(weights))


def test_the_referee_sees_a_wrong_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_triton, "prepare", Launched)
    assert adamw_triton.agrees(CPU, adamw._fused_update)
    monkeypatch.setattr(adamw_triton, "prepare", lambda *held, **given: Launched(*held, spoil=1.01, **given))
    assert not adamw_triton.agrees(CPU, adamw._fused_update)


@pytest.mark.parametrize("mode", ["fp32", "fp16-mixed", "fp16-master"])
def test_steps_through_the_launch_are_those_of_torch(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from stillroom.config.schema import TrainConfig
    from stillroom.precision.policy import resolve

    def trained(is_at_once: bool) -> list[torch.Tensor]:
        choice = adamw.UpdateChoice(is_at_once, "test")
        monkeypatch.setattr(adamw, "choose_update", lambda device: choice)
        monkeypatch.setattr(adamw_triton, "prepare", Launched)
        generator = torch.Generator().manual_seed(0)
        matrix, gain = (torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((16, 8), (8,)))
        policy = resolve(mode, "cpu")
        group = adamw.ParameterGroup("body", 1e-2, (("matrix", matrix), ("gain", gain)))
        optimizer = policy.optimizer([group], TrainConfig())
        for _ in range(3):
            for parameter in (matrix, gain):
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            optimizer.step(1.0, {"body": 0.5})
        return [*optimizer.tensors().values(), matrix.data, gain.data]

    for one, other in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
