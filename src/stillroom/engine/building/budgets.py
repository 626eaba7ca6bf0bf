"""Where snapshots are kept, by what main memory has room for."""

from __future__ import annotations

import psutil

from stillroom.checkpoint import CheckpointStore
from stillroom.config import Config
from stillroom.parallel import Parallel
from stillroom.precision import AdamW, bytes_per_parameter
from stillroom.snapshots import CheckpointSnapshots, SnapshotRing, Snapshots
from stillroom.telemetry import EventLog

_SNAPSHOT_SHARE = 0.4


def snapshot_bytes(config: Config, mode: str, optimizer: AdamW) -> int:
    """Main memory that the ring takes with the best student, and the initial state where the guard may begin again.

    Frozen weights are in none of them.
    """
    num_snapshots = config.guard.snapshot_ring + (config.guard.on_exhausted == "reset")
    moments = config.precision.moments
    total = 0
    for group, cells in optimizer.cells.items():
        # Projectors are FP32 in every mode and no part of the student.
        is_student = group != "projectors"
        held = bytes_per_parameter(mode if is_student and group not in optimizer.fp32_groups else "fp32", moments)
        bytes_each = held.in_main_memory(num_snapshots) if is_student else num_snapshots * held.snapshot
        total += bytes_each * sum(cell.parameter.numel() for cell in cells)
    return total


def make_snapshots(
    config: Config,
    mode: str,
    optimizer: AdamW,
    checkpoints: CheckpointStore,
    log: EventLog,
    parallel: Parallel,
) -> Snapshots:
    """Snapshots in memory while they take a modest share of what is free, else the checkpoints on disk."""
    needed = snapshot_bytes(config, mode, optimizer)
    free = psutil.virtual_memory().available
    if parallel.all_of(needed * parallel.num_copies <= _SNAPSHOT_SHARE * free):
        return SnapshotRing(config.guard.snapshot_ring)
    log.write(
        "note",
        text=f"{config.guard.snapshot_ring} snapshots would take {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB free: "
        "a rollback returns to the newest checkpoint on disk instead",
    )
    return CheckpointSnapshots(checkpoints)
