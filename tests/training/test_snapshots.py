"""Good states to return to: copies in main memory, or the checkpoints on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stillroom.training.checkpoint import CheckpointSnapshots, CheckpointStore, Saved, SnapshotRing


def state(step: int, weight: torch.Tensor) -> Saved:
    return Saved(step, {"student": {"weight": weight}}, {"state": {"applied": step}})


def test_a_ring_holds_copies_that_later_steps_do_not_change() -> None:
    snapshots, living = SnapshotRing(2), torch.zeros(4)
    for step in (1, 2, 3):
        living.fill_(step)
        snapshots.keep(state(step, living))
    living.fill_(9.0)
    newest = snapshots.newest()
    assert newest is not None and newest.step == 3 and len(snapshots) == 2
    assert newest.tensors["student"]["weight"].tolist() == [3.0] * 4
    snapshots.drop_newest()
    newest = snapshots.newest()
    assert newest is not None and newest.tensors["student"]["weight"].tolist() == [2.0] * 4


def test_a_ring_never_holds_more_copies_than_its_size() -> None:
    """The oldest goes before the next is made: memory for one more is nowhere planned."""
    snapshots, held = SnapshotRing(2), []

    class Counting(Saved):
        def copied(self) -> Saved:
            held.append(len(snapshots) + 1)
            return super().copied()

    for step in range(5):
        snapshots.keep(Counting(step, {"student": {"weight": torch.zeros(4)}}, {}))
    assert held == [1, 2, 2, 2, 2]


def test_a_copy_is_in_main_memory_whatever_the_state_is_on(monkeypatch: Any) -> None:
    asked = []
    original = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        asked.append((args, options))
        return original(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", to)
    state(1, torch.zeros(4)).copied()
    assert asked == [(("cpu",), {"copy": True})]


def test_checkpoints_serve_as_snapshots_where_memory_is_short(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2):
        store.save(step, {"student": {"weight": torch.zeros(2)}}, {"state": {"applied": step}})
    snapshots = CheckpointSnapshots(store)
    snapshots.keep(Saved(3, {}, {}))
    newest = snapshots.newest()
    assert newest is not None and newest.step == 2 and len(snapshots) == 2
    snapshots.drop_newest()
    newest = snapshots.newest()
    assert newest is not None and newest.step == 1
