"""Laws of groups of processes: they are of one size, and belong to a sharded student."""

from __future__ import annotations

import pytest

from stillroom.config import load_config
from stillroom.errors import ConfigError
from stillroom.parallel.mesh import check_shard_size


def test_groups_of_processes_have_one_size() -> None:
    for size, shard_size in ((4, 0), (4, 2), (4, 4), (6, 3)):
        check_shard_size(shard_size, size, "fsdp")
    for size, shard_size in ((4, 3), (2, 4), (7, 2)):
        with pytest.raises(ConfigError, match=f"{size} processes cannot be divided into groups of {shard_size}"):
            check_shard_size(shard_size, size, "fsdp")


def test_groups_belong_to_a_sharded_student() -> None:
    with pytest.raises(ConfigError, match=r"train\.strategy is 'ddp'"):
        check_shard_size(2, 4, "ddp")
    check_shard_size(0, 4, "ddp")
    with pytest.raises(ConfigError, match="set strategy = 'fsdp', it is 'auto'"):
        load_config(overrides={"train.shard_size": 2})
    with pytest.raises(ConfigError, match="set strategy = 'ddp'"):
        load_config(overrides={"train.strategy": "fsdp", "train.shard_size": 1})
