"""Laws of DDP inside a run, in a group of one process: what is summed, in which precision, and what stays without."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stillroom.config.schema import TrainConfig
from stillroom.core.errors import Interrupted
from stillroom.parallel import Replicated
from stillroom.parallel.base import Processes
from stillroom.precision import AdamW, ParameterGroup, resolve


@pytest.fixture
def parallel() -> Iterator[Replicated]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Replicated(0, 1)
    finally:
        dist.destroy_process_group()


def optimizer_of(mode: str) -> tuple[AdamW, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.full((2, 3), float(number + 1))) for number in range(3)]
    named = tuple((f"p{number}", parameter) for number, parameter in enumerate(parameters))
    precision = resolve(mode, torch.device("cpu"))
    return precision.optimizer([ParameterGroup("student", 1e-3, named)], TrainConfig()), parameters


def learn(parallel: Replicated, losses: list[Tensor], optimizer: AdamW) -> None:
    with parallel.window():
        parallel.scored([SimpleNamespace(num_scored=1)] * len(losses))  # type: ignore[list-item]
        for number, loss in enumerate(losses, start=1):
            parallel.forward(lambda: loss, is_last=number == len(losses)).backward()  # noqa: B023
    parallel.sum_gradients(optimizer)


@pytest.mark.parametrize("mode", ["fp32", "fp16-master"])
def test_a_parameter_of_an_earlier_micro_batch_is_summed_and_one_of_none_has_no_gradient(
    mode: str, parallel: Replicated
) -> None:
    optimizer, (first, second, third) = optimizer_of(mode)
    parallel.prepare(optimizer)
    for _ in range(2):
        learn(parallel, [(first * 2).sum() + (second * 3).sum(), (first * 5).sum()], optimizer)
        found = dict(optimizer.named_gradients())
        assert set(found) == {"p0", "p1"}
        assert torch.equal(found["p0"], torch.full((2, 3), 7.0)) and torch.equal(found["p1"], torch.full((2, 3), 3.0))
        assert all(gradient.dtype == torch.float32 for gradient in found.values())
        assert third.grad is None
        optimizer.zero_grad()


def test_fp16_gradients_of_micro_batches_are_added_in_fp32(parallel: Replicated) -> None:
    optimizer, (first, *_others) = optimizer_of("fp16-master")
    parallel.prepare(optimizer)
    learn(parallel, [(first * 2048).sum(), (first * 0.5).sum()], optimizer)  # FP16 has steps of 2 above 2048
    assert torch.equal(optimizer.gradients("student")[0], torch.full((2, 3), 2048.5))


def test_a_window_that_ran_out_of_memory_is_sent_as_zeros_and_taken_again(parallel: Replicated) -> None:
    optimizer, (first, *_others) = optimizer_of("fp32")
    parallel.prepare(optimizer)

    def fails() -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError), parallel.window():
        parallel.forward(fails, is_last=True)
    optimizer.zero_grad()
    parallel.prepare(optimizer)
    learn(parallel, [(first * 2).sum()], optimizer)
    assert torch.equal(optimizer.gradients("student")[0], torch.full((2, 3), 2.0))


def test_an_error_of_the_sum_ends_the_run_so_that_it_can_be_resumed_and_other_errors_stay(
    parallel: Replicated, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, (first, *_others) = optimizer_of("fp32")
    parallel.prepare(optimizer)

    def broken(*_arguments: object, **_named: object) -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(ValueError, match="of ours"), parallel.window():
        raise ValueError("of ours")
    monkeypatch.setattr(dist, "all_reduce", broken)
    with pytest.raises(Interrupted, match="Connection closed by peer"), parallel.window():
        parallel.forward(lambda: first.sum(), is_last=True).backward()


def test_random_numbers_differ_between_processes_and_attempts_and_come_again() -> None:
    """Dropout of two processes with the same numbers would learn half as much from a window."""

    def drawn(rank: int, attempted: int) -> list[float]:
        with torch.random.fork_rng(devices=[]):
            Processes.seed(SimpleNamespace(rank=rank), 7, attempted)  # type: ignore[arg-type]
            return list(torch.rand(4).tolist())

    draws = [drawn(rank, attempted) for rank in (0, 1) for attempted in (0, 1)]
    assert len({tuple(one) for one in draws}) == 4
    assert drawn(1, 1) == draws[-1]
