"""Where snapshots are kept and whether checkpoints are written in the background, by what main memory has room for."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from stillroom.checkpoint import CheckpointStore
from stillroom.config import Config
from stillroom.engine.background_save import Saves
from stillroom.parallel import Parallel
from stillroom.precision import AdamW, BytesPerParameter, bytes_per_parameter
from stillroom.snapshots import CheckpointSnapshots, SnapshotRing, Snapshots
from stillroom.telemetry import EventLog

_SNAPSHOT_SHARE = 0.4


def snapshot_bytes(config: Config, mode: str, optimizer: AdamW) -> int:
    """Main memory that the ring takes with the best student, and the initial state where the guard may begin again.

    Frozen weights are in none of them.
    """
    num_snapshots = config.guard.snapshot_ring + (config.guard.on_exhausted == "reset")
    return num_snapshots * copy_bytes(config, mode, optimizer) + best_bytes(config, mode, optimizer)


def copy_bytes(config: Config, mode: str, optimizer: AdamW) -> int:
    """Main memory that one copy of weights and moments takes."""
    return sum(held.snapshot * number for _group, held, number in _held(config, mode, optimizer))


def best_bytes(config: Config, mode: str, optimizer: AdamW) -> int:
    """The same of the best student. Projectors are no part of it."""
    return sum(held.best * number for group, held, number in _held(config, mode, optimizer) if group != "projectors")


def _held(config: Config, mode: str, optimizer: AdamW) -> Iterator[tuple[str, BytesPerParameter, int]]:
    """(group, bytes of a parameter, number of parameters) of all that is trained."""
    for group, cells in optimizer.cells.items():
        is_half = group != "projectors" and group not in optimizer.fp32_groups  # projectors are FP32 in every mode
        held = bytes_per_parameter(mode if is_half else "fp32", config.precision.moments)
        yield group, held, sum(cell.parameter.numel() for cell in cells)


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


def make_saves(
    config: Config, mode: str, optimizer: AdamW, ring: Snapshots, log: EventLog, parallel: Parallel
) -> Saves:
    """Saves in the background where that was asked for, or where memory is ample: not where snapshots have no room."""
    asked = config.checkpoint.background
    # Of all processes together. With ddp one of them writes, and only that one copies.
    copied = copy_bytes(config, mode, optimizer) * (parallel.num_copies if parallel.is_sharded else 1)
    needed = copied + snapshot_bytes(config, mode, optimizer) * parallel.num_copies
    free = psutil.virtual_memory().available
    is_ample = isinstance(ring, SnapshotRing) and parallel.all_of(needed <= _SNAPSHOT_SHARE * free)
    if asked == "auto" and not is_ample:
        text = f"a copy of the state to save takes {copied / 1e9:.1f} GB of {free / 1e9:.1f} GB free: training waits "
        log.write("note", text=text + "while a checkpoint is written")
    is_background = asked == "on" or (asked == "auto" and is_ample)
    beside = parallel.beside() if is_background and parallel.is_sharded else None
    return Saves(is_background=is_background, beside=beside)
