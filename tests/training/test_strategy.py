"""Laws of sharding: what does not work with it is refused by name when the run is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from torch.distributed.fsdp import FSDPModule

from stillroom.config import load_config
from stillroom.core.errors import ConfigError
from stillroom.parallel import Parallel
from stillroom.training.build import make_precision
from stillroom.training.models import check_strategy, load_models, unused_strategy

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "residuals": ({"precision.mode": "fp16-split"}, "fp16-split"),
    "stochastic rounding": ({"precision.mode": "fp16-sr"}, "fp16-sr"),
    "compile": (
        {"train.compile": "student", "student.gradient_checkpointing": True},
        "compiled layers that are computed again",
    ),
}


class OfParts(Parallel):
    is_sharded = True


def check(world: Path, over: dict[str, Any], parallel: Parallel) -> None:
    config = load_config(overrides={**tiny.settings(world), **over})
    device = torch.device("cpu")
    models = load_models(config, device)
    check_strategy(config, models, make_precision(config, models, device), parallel)


@pytest.mark.parametrize("name", REFUSED)
def test_a_sharded_student_refuses_by_name(name: str, world: Path) -> None:
    over, words = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        check(world, over, OfParts())
    assert words in caught.value.what and caught.value.where
    assert "train.strategy=ddp" in caught.value.advice[-1]
    check(world, over, Parallel())


def test_a_mixture_of_experts_is_sharded_where_torch_can_skip_experts(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = {"student.model": str(tiny.save_model(tmp_path / "student", "mixtral", width=16, num_layers=1))}
    check(world, over, OfParts())
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with refused(ConfigError, "student.model"):
        check(world, over, OfParts())


def test_a_strategy_for_one_process_is_said_to_have_no_effect() -> None:
    config = load_config(overrides={"train.strategy": "fsdp"})
    assert "'fsdp' has no effect" in unused_strategy(config, Parallel())[0]
    assert unused_strategy(load_config(), Parallel()) == []


def test_nothing_is_refused_of_what_works(world: Path) -> None:
    for mode in ("fp32", "bf16-mixed", "fp16-mixed", "fp16-master"):
        check(world, {"precision.mode": mode, "train.compile": "student"}, OfParts())
    check(world, {"precision.mode": "fp16-split", "student.adapter.rank": 2}, OfParts())
