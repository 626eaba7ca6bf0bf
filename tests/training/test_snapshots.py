"""Good states to return to: copies in main memory, or the checkpoints on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stillroom.core.files import write_durably
from stillroom.training.checkpoint import (
    CheckpointSnapshots,
    CheckpointStore,
    DiskCopies,
    Saved,
    SnapshotRing,
    as_safetensors,
)


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


def test_copies_on_disk_are_the_same_bits_and_leave_no_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    living = {
        "weight": torch.randn(5, 3),
        "half": torch.randn(7).to(torch.bfloat16),
        "count": torch.tensor(3),
        "none": torch.zeros(0, 4),
        "transposed": torch.randn(4, 2).t(),
    }
    before = {name: tensor.clone() for name, tensor in living.items()}
    said: list[str] = []
    snapshots = SnapshotRing(2, DiskCopies(tmp_path, said.append))
    snapshots.keep(Saved(1, {"student": living, "random": {}}, {}))
    for tensor in living.values():
        tensor.zero_()
    newest = snapshots.newest()
    assert newest is not None and newest.tensors["random"] == {}
    for name, tensor in before.items():
        kept = newest.tensors["student"][name]
        assert kept.dtype == tensor.dtype and torch.equal(kept, tensor)
    assert list(tmp_path.iterdir()) == [] and not said


def _resident_kilobytes(address: int) -> int:
    """Of the mapping that holds an address, as Linux tells."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if ends := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(ends[1], 16) <= address < int(ends[2], 16)
        elif is_inside and line.startswith("Rss:"):
            return int(line.split()[1])
    raise AssertionError("nothing is mapped there")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks Linux")
def test_copies_on_disk_take_no_memory_after_a_checkpoint_was_written_from_them(tmp_path: Path) -> None:
    kept = DiskCopies(tmp_path, print).copy({name: torch.ones(1 << 23) for name in "abc"})
    places = []
    for part in as_safetensors(kept):
        assert bytes(part)  # reads every page
        places.append(_resident_kilobytes(kept["a"].data_ptr()))
    assert max(places) <= 17 * 1024 and _resident_kilobytes(kept["a"].data_ptr()) == 0
    assert all(bool((tensor == 1).all()) for tensor in kept.values())


def test_a_copy_that_the_disk_does_not_take_is_kept_in_memory_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    living = torch.ones(3)
    (kept,) = DiskCopies(tmp_path / "gone", said.append).copy({"weight": living}).values()
    living.zero_()
    assert kept.tolist() == [1.0] * 3 and len(said) == 1


def test_a_checkpoint_is_written_as_safetensors_reads_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    named = {
        "b": torch.randn(3, 2),
        "a": torch.arange(5),
        "h": torch.randn(3).half(),
        "n": torch.zeros(0),
        "s": torch.tensor(True),
    }
    write_durably(tmp_path / "one.safetensors", as_safetensors(named))
    read = load_file(tmp_path / "one.safetensors")
    assert set(read) == set(named)
    for name, tensor in named.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
