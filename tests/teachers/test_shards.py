"""Laws of a teacher in parts: gathered once a window, whole while it is asked, and no head that vanishes."""

from __future__ import annotations

import torch

from stillroom.core.types import HeadWeights
from stillroom.teachers.placement import Shards


class Counted:
    """Parts whose head is emptied when it is released, as FSDP2 does it."""

    def __init__(self) -> None:
        self.head = HeadWeights(torch.ones(3, 2), bias=torch.ones(3))
        self.log: list[str] = []

    def gather(self) -> None:
        self.log.append("gather")

    def release(self) -> None:
        self.log.append("release")
        for tensor in (self.head.weight, self.head.bias):
            assert tensor is not None
            tensor.zero_()

    def facts(self) -> dict[str, int]:
        return {"held_bytes": 1, "whole_bytes": 2}


def test_the_rest_is_gathered_once_a_window_and_released_at_its_end() -> None:
    parts = Counted()
    shards = Shards(parts)
    for _ in range(2):
        shards.begin_window()
        for _micro_batch in range(3):
            with shards.at_work(), shards.at_work():
                head = shards.lasting(parts.head)
        assert parts.log[-1] == "gather" and head.weight is parts.head.weight, "no copy inside a window"
        shards.end_window()
    assert parts.log == ["gather", "release"] * 2


def test_a_head_outlives_a_question_outside_of_a_window() -> None:
    parts = Counted()
    shards = Shards(parts)
    with shards.at_work():
        with shards.at_work():
            head = shards.lasting(parts.head)
        assert parts.log == ["gather"], "a visit inside another one does not end it"
    assert parts.log == ["gather", "release"]
    assert torch.equal(head.weight, torch.ones(3, 2))
    assert head.bias is not None and torch.equal(head.bias, torch.ones(3))


def test_a_window_that_asks_nothing_gathers_nothing_and_a_window_may_begin_again() -> None:
    parts = Counted()
    shards = Shards(parts)
    shards.begin_window()
    shards.end_window()
    assert parts.log == []
    shards.begin_window()
    with shards.at_work():
        pass
    shards.begin_window()  # taken again
    with shards.at_work():
        pass
    shards.end_window()
    assert parts.log == ["gather", "release"]
    assert shards.facts() == {"teacher_shards": {"held_bytes": 1, "whole_bytes": 2}}
