"""Bytes that are alive at once, of real tensors and of shapes."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stillroom.training.trace import LiveTensors


def _work() -> LiveTensors:
    weight = torch.ones(10, 10)
    live = LiveTensors([weight])
    with live:
        with live.part("first"):
            one = weight * 2  # 400 bytes
            two = one + 1  # 400 more
        del one
        with live.part("second"):
            three = torch.cat([two, two])  # 800
            view = three.view(-1)
            weight.mul_(1)
        del three, view, two
    return live


def test_the_peak_is_the_largest_sum_and_known_tensors_and_views_are_not_in_it() -> None:
    live = _work()
    assert (live.peak, live.live) == (1200, 0)
    assert live.at_peak == {"first": 400, "second": 800}


def test_shapes_have_the_same_peak_as_values() -> None:
    with FakeTensorMode():
        assert _work().peak == 1200
