"""Divide the teacher among the processes of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stillroom.config import Config
from stillroom.errors import ConfigError
from stillroom.models import LoadedModel
from stillroom.models.anatomy import layers_if_any
from stillroom.parallel import Parallel
from stillroom.parallel.processes import Processes
from stillroom.parallel.torch_version import check_torch
from stillroom.teachers.placement import Placement, StreamedModel
from stillroom.teachers.shards import Shards

_WHERE = "teacher.placement"


def reads_layers_one_by_one(config: Config, parallel: Parallel | None) -> bool:
    """Whether a process needs no more of the teacher than its part: a student that is cut from it needs the whole."""
    has_peers = parallel is not None and parallel.size > 1
    return has_peers and config.teacher.placement == "shard" and config.student.init != "shrink"


def shard_teacher(
    config: Config,
    loaded: LoadedModel | None,
    parallel: Parallel,
    device: torch.device,
    *,
    tell: Callable[[str], object],
) -> Placement | None:
    """Leave this process a part of each weight of the teacher where that was asked for, else None."""
    if loaded is None or config.teacher.placement != "shard":
        return None
    if not isinstance(parallel, Processes):
        tell("teacher.placement = 'shard' has no effect: there is one process, which holds the whole teacher")
        return None
    if config.train.batch_size == "auto" and device.type != "cpu":
        raise ConfigError(
            "a sharded teacher does not work with train.batch_size = 'auto': a trial that runs out of memory in one "
            "process leaves the others waiting",
            where="train.batch_size",
            advice=["give train.batch_size a number", "--set teacher.placement=device"],
        )
    check_torch(is_sharded=True)
    from stillroom.parallel.frozen import shard_frozen  # it takes half a second to import

    blocks = layers_if_any(loaded.network)
    options: dict[str, Any] = {"device": device.type, "where": _WHERE}
    if isinstance(loaded, StreamedModel) and loaded.stream is not None:
        loaded.stream.settle(device)
        loaded.stream.stop()
        options["bring"] = loaded.stream.bring
    parts = shard_frozen(parallel, loaded.network, blocks, **options)
    held, whole = (parts.facts()[name] / 1e6 for name in ("held_bytes", "whole_bytes"))
    tell(f"the teacher is sharded: this process holds {held:,.1f} MB of {whole:,.1f} MB between answers")
    return Shards(parts)
