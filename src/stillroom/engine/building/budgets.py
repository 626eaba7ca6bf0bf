"""Where snapshots are kept and whether checkpoints are written in the background, by what main memory has room for."""

from __future__ import annotations

import psutil

from stillroom.checkpoint import CheckpointStore
from stillroom.config import Config
from stillroom.engine.background_save import Saves
from stillroom.engine.memory import Copies, copies_of
from stillroom.parallel import Parallel
from stillroom.precision import AdamW, bytes_per_parameter
from stillroom.snapshots import CheckpointSnapshots, SnapshotRing, Snapshots
from stillroom.telemetry import EventLog


def state_copies(config: Config, mode: str, optimizer: AdamW) -> Copies:
    """The copies of what this optimizer trains. Projectors are FP32 in every mode."""
    trained = []
    for group, cells in optimizer.cells.items():
        is_student = group != "projectors"
        own_mode = mode if is_student and group not in optimizer.fp32_groups else "fp32"
        held = bytes_per_parameter(own_mode, config.precision.moments)
        trained.append((held, sum(cell.parameter.numel() for cell in cells), is_student))
    return copies_of(config, trained)


def make_snapshots(
    config: Config,
    mode: str,
    optimizer: AdamW,
    checkpoints: CheckpointStore,
    log: EventLog,
    parallel: Parallel,
) -> Snapshots:
    """Keep snapshots in memory while they take a modest share of what is free, else use the checkpoints on disk."""
    copies, free = state_copies(config, mode, optimizer), psutil.virtual_memory().available
    if parallel.all_of(copies.leave_room(free, num_copies=parallel.num_copies)):
        return SnapshotRing(config.guard.snapshot_ring)
    log.write(
        "note",
        text=f"{config.guard.snapshot_ring} snapshots would take {copies.kept / 1e9:.1f} GB of {free / 1e9:.1f} GB "
        "free: a rollback returns to the newest checkpoint on disk instead",
    )
    return CheckpointSnapshots(checkpoints)


def make_saves(
    config: Config, mode: str, optimizer: AdamW, ring: Snapshots, log: EventLog, parallel: Parallel
) -> Saves:
    """Save in the background where that was asked for, or where memory is ample: not where snapshots have no room."""
    asked = config.checkpoint.background
    copies, free = state_copies(config, mode, optimizer), psutil.virtual_memory().available
    num_savers = parallel.num_copies if parallel.is_sharded else 1  # with ddp one process writes, and only it copies
    has_room = copies.with_saves_leave_room(free, num_copies=parallel.num_copies, num_savers=num_savers)
    is_ample = isinstance(ring, SnapshotRing) and parallel.all_of(has_room)
    if asked == "auto" and not is_ample:
        log.write(
            "note",
            text=f"a copy of the state to save takes {num_savers * copies.to_save / 1e9:.1f} GB of {free / 1e9:.1f} GB "
            "free: training waits while a checkpoint is written",
        )
    is_background = asked == "on" or (asked == "auto" and is_ample)
    beside = parallel.beside() if is_background and parallel.is_sharded else None
    return Saves(is_background=is_background, beside=beside)
