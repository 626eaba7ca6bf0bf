"""Weights that visit the device: they come, they are never copied back, and what a forward changes is not lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from stillroom.teachers import placement
from stillroom.teachers.placement import Offloaded

CPU = torch.device("cpu")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The device is a second place in main memory: the answer lists what came there."""
    came: list[Tensor] = []

    def fetch(home: Tensor, _device: torch.device) -> Tensor:
        came.append(home.clone())
        return came[-1]

    monkeypatch.setattr(placement, "_fetched", fetch)
    return came


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.inner.weight
        self.register_buffer("steps", torch.zeros(3))


def addresses(net: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*net.parameters(), *net.buffers())]


def test_weights_come_and_go_home_without_a_copy_back(fetched: list[Tensor]) -> None:
    net = Net()
    parameters, kept = list(net.parameters()), [parameter.detach().clone() for parameter in net.parameters()]
    homes = addresses(net)
    away = Offloaded(net, CPU)
    for visit in (1, 2):
        with away.at_work():
            assert addresses(net) == [tensor.data_ptr() for tensor in fetched[-len(homes) :]], "all of it is there"
            there = addresses(net)
            with away.at_work():
                pass
            assert addresses(net) == there, "the outer visit lasts"
            for tensor in fetched:
                tensor.fill_(float("nan"))  # past the version counter, as if the device had lost it
        assert len(fetched) == visit * len(homes), "once a visit"
        assert addresses(net) == homes
    assert all(now is before for now, before in zip(net.parameters(), parameters, strict=True)), "the same parameters"
    assert all(torch.equal(now, before) for now, before in zip(net.parameters(), kept, strict=True)), "never copied out"
    assert net.tied.weight is net.inner.weight


def test_weights_go_home_when_the_visit_fails(fetched: list[Tensor]) -> None:
    net = Net()
    homes = addresses(net)
    with pytest.raises(KeyError), Offloaded(net, CPU).at_work():
        raise KeyError
    assert fetched and addresses(net) == homes


@pytest.mark.usefixtures("fetched")
def test_a_buffer_that_a_forward_writes_or_makes_anew_is_kept() -> None:
    net = Net()
    away = Offloaded(net, CPU)
    for number in (1.0, 2.0):
        with away.at_work():
            net.steps.add_(number)
    assert net.steps.tolist() == [3.0] * 3
    with away.at_work():
        net.register_buffer("steps", torch.full((5,), 7.0))
    with away.at_work():
        assert net.steps.tolist() == [7.0] * 5
    assert net.steps.tolist() == [7.0] * 5


@pytest.mark.parametrize("sizes", [[], [1], [64, 64, 64], [1000, 3, 70_000, 64, 5, 65_536], [1] * 100, [100_000] * 9])
def test_pinned_blocks_hold_every_tensor_once_in_powers_of_two(sizes: list[int]) -> None:
    taken = []
    for size, held in placement.pinned_blocks(sizes):
        assert size & (size - 1) == 0, "as the allocator would round it"
        spans = sorted((offset, offset + sizes[number]) for number, offset in held)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans)) and spans[-1][1] <= size
        taken += [number for number, _ in held]
    assert sorted(taken) == list(range(len(sizes)))


def test_a_teacher_in_shared_blocks_takes_little_more_than_its_bytes() -> None:
    """Qwen2.5-7B: 15.2 GB, and 29 GB where each tensor is rounded up by itself."""
    layer = [
        2 * n
        for n in (3584 * 3584, 3584, 3584 * 512, 512, 3584 * 512, 512, 3584 * 3584, *[3584 * 18944] * 3, 3584, 3584)
    ]
    sizes = [2 * 152064 * 3584] * 2 + 28 * layer + [2 * 3584]
    alone = sum(1 << (size - 1).bit_length() for size in sizes)
    assert alone > 1.8 * sum(sizes)
    assert placement.pinned_bytes(sizes) < 1.15 * sum(sizes)
