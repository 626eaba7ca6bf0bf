"""Laws of a frozen network in parts, in a group of one process: every weight is in parts, or nothing begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from refusals import refused
from transformers import AutoModelForCausalLM

from stillroom.core.errors import BrokenAtStart
from stillroom.models.anatomy import layers_if_any
from stillroom.parallel import Replicated, fsdp
from stillroom.parallel.fsdp import FrozenParts, shard_frozen


@pytest.fixture
def parallel() -> Iterator[Replicated]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Replicated(0, 1)
    finally:
        dist.destroy_process_group()


def sharded(parallel: Replicated, network: Any, blocks: list[Any]) -> FrozenParts:
    return shard_frozen(parallel, network, blocks, device="cpu", where="teacher.placement")


def test_a_network_in_parts_answers_as_it_did_and_every_process_asks_as_often(
    world: Path, parallel: Replicated
) -> None:
    network = AutoModelForCausalLM.from_pretrained(world / "teacher").eval()
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = network(ids).logits
        parts = sharded(parallel, network, layers_if_any(network))
        assert all(hasattr(one, "to_local") and not one.requires_grad for one in network.parameters())
        parts.gather()
        assert torch.equal(network(ids).logits, expected)
        parts.release()
    assert all(hasattr(one, "to_local") for one in network.parameters())
    assert parallel.asks_together and not parallel.takes_smaller_parts
    held = parts.facts()
    assert held["held_bytes"] == held["whole_bytes"] == sum(one.numel() * 4 for one in network.parameters())


def test_sharding_that_was_asked_for_and_did_not_happen_ends_the_run(
    world: Path, parallel: Replicated, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = AutoModelForCausalLM.from_pretrained(world / "teacher")
    with refused(BrokenAtStart, "teacher.placement"):
        sharded(parallel, network, [])
    monkeypatch.setattr(fsdp, "fully_shard", lambda *_modules, **_options: None)
    with refused(BrokenAtStart, "teacher.placement", "model.embed_tokens.weight"):
        sharded(parallel, network, layers_if_any(network))
