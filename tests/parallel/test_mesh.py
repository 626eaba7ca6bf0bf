"""Laws of groups of processes: they are of one size, and belong to a sharded student."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from process_jobs import environment, free_port, losses
from refusals import refused

from stillroom.config import load_config
from stillroom.core.errors import ConfigError
from stillroom.parallel.fsdp import check_shard_size


def test_groups_of_processes_have_one_size() -> None:
    for size, shard_size in ((4, 0), (4, 2), (4, 4), (6, 3)):
        check_shard_size(shard_size, size, "fsdp")
    for size, shard_size in ((4, 3), (2, 4), (7, 2)):
        with refused(ConfigError, "train.shard_size"):
            check_shard_size(shard_size, size, "fsdp")


def test_groups_belong_to_a_sharded_student() -> None:
    with refused(ConfigError, "train.shard_size", "train.strategy"):
        check_shard_size(2, 4, "ddp")
    check_shard_size(0, 4, "ddp")
    with refused(ConfigError, "", "shard_size", "strategy"):
        load_config(overrides={"train.shard_size": 2})
    with refused(ConfigError, "", "shard_size", "strategy"):
        load_config(overrides={"train.strategy": "fsdp", "train.shard_size": 1})


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill@3", "freeze@3"])
def test_where_a_process_of_a_copy_is_gone_or_silent_all_others_end_and_can_be_resumed(
    fault: str, world: Path, tmp_path: Path
) -> None:
    """With a sharded teacher too. The frozen process is still there until it is killed, as torchrun would."""
    given = tiny.settings(world) | {
        "train.max_steps": 6, "train.save_steps": 1, "train.peer_timeout_minutes": 0.4, "train.strategy": "fsdp",
        "train.shard_size": 2, "teacher.placement": "shard",
        "checkpoint.background": "off",  # a save in flight is lost with the process that has stopped
    }  # fmt: skip
    words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "stillroom", "distill", "--out", str(tmp_path / "run"), "--device", "cpu", *words]
    place = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [*command, *(["--inject", fault] if rank == 3 else [])],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(RANK=str(rank), **place),
        )
        for rank in range(4)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=240)[1] for process in started[:3]]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started[:3]] == [75] * 3, told
    assert all("another process of this run is gone" in " ".join(text.split()) for text in told)
    assert len(losses(tmp_path / "run")) == 2
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()
