"""Where snapshots are kept: main memory counts all that is held there."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tiny
import torch

from stillroom.config import load_config
from stillroom.config.schema import PrecisionConfig
from stillroom.parallel import Parallel
from stillroom.precision import AdamW, ParameterGroup, resolve
from stillroom.precision.policy import POLICIES
from stillroom.telemetry import EventLog, SilentLog, read_events
from stillroom.training import memory
from stillroom.training.checkpoint import CheckpointSnapshots, CheckpointStore, SnapshotRing
from stillroom.training.memory import make_saves, make_snapshots, state_copies


def parts(mode: str, moments: str) -> tuple[torch.nn.Module, AdamW]:
    student = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(3)))
    frozen, projector = torch.nn.Linear(256, 256, bias=False), torch.nn.Linear(256, 256, bias=False)
    frozen.requires_grad_(False)
    student.append(frozen)
    named = tuple((name, part) for name, part in student.named_parameters() if part.requires_grad)
    precision = resolve(mode, config=PrecisionConfig(moments=moments))  # type: ignore[arg-type]
    config = load_config(overrides=tiny.settings(Path()))
    groups = [ParameterGroup("student", 1e-3, named)]
    groups.append(ParameterGroup("projectors", 1e-3, (("projectors.one", projector.weight),)))
    return student, precision.optimizer(groups, config.train)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("mode", list(POLICIES))
@pytest.mark.parametrize("on_exhausted", ["halt", "reset"])
def test_the_budget_is_what_the_ring_and_the_best_student_take(mode: str, moments: str, on_exhausted: str) -> None:
    over = {"precision.moments": moments, "guard.snapshot_ring": 3, "guard.on_exhausted": on_exhausted}
    config = load_config(overrides={**tiny.settings(Path()), **over})
    student, optimizer = parts(mode, moments)
    projector = optimizer.cells["projectors"][0].parameter
    trained = [part for part in student.parameters() if part.requires_grad]  # a frozen one is in no snapshot
    weights = sum(part.numel() * part.element_size() for part in trained)
    state = sum(part.numel() * part.element_size() for part in optimizer.tensors().values())
    num_copies = 4 if on_exhausted == "reset" else 3
    held = num_copies * (weights + state + 4 * projector.numel()) + weights
    rel = 1e-2 if moments == "int8" else 1e-3
    assert state_copies(config, mode, optimizer).kept == pytest.approx(held, rel=rel), "scales are not counted"


def test_snapshots_go_to_the_disk_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(overrides=tiny.settings(Path()))
    _student, optimizer = parts("fp32", "float32")
    needed = state_copies(config, "fp32", optimizer).kept
    store, log = CheckpointStore(tmp_path), SilentLog()
    for free, kind in ((int(needed / 0.4) + 10, SnapshotRing), (int(needed / 0.4) - 10, CheckpointSnapshots)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: type("Memory", (), {"available": free}))
        assert isinstance(make_snapshots(config, "fp32", optimizer, store, log, Parallel()), kind)


@pytest.mark.parametrize("asked", ["auto", "on", "off"])
def test_checkpoints_are_written_in_the_background_where_memory_is_ample(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(overrides=tiny.settings(Path(), checkpoint__background=asked))
    _student, optimizer = parts("fp32", "float32")
    copied = state_copies(config, "fp32", optimizer).to_save
    trained = sum(4 * cell.parameter.numel() for cells in optimizer.cells.values() for cell in cells)
    assert copied == 3 * trained, "weights and both moments"
    needed = copied + state_copies(config, "fp32", optimizer).kept
    for free, is_ample in ((int(needed / 0.4) + 10, True), (int(needed / 0.4) - 10, False)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: type("Memory", (), {"available": free}))
        with EventLog(tmp_path / f"{asked}-{is_ample}.jsonl") as log:
            snapshots = make_snapshots(config, "fp32", optimizer, CheckpointStore(tmp_path), log, Parallel())
            saves = make_saves(config, "fp32", optimizer, snapshots, log, Parallel())
        assert isinstance(snapshots, SnapshotRing)
        assert saves.is_background == (asked == "on" or (asked == "auto" and is_ample))
        assert len(read_events(log.path)) == (asked == "auto" and not is_ample), "training that waits is told of"


@pytest.mark.parametrize("mode", list(POLICIES))
def test_what_is_kept_in_fp32_in_every_mode_is_counted_so(mode: str) -> None:
    """The matrices of an adapter: FP32 under every policy."""
    config = load_config(overrides=tiny.settings(Path()))
    matrix = torch.nn.Parameter(torch.ones(64, 64))
    group = ParameterGroup("student", 1e-3, (("matrix", matrix),), in_fp32=True)
    optimizer = resolve(mode).optimizer([group], config.train)
    state = sum(part.numel() * part.element_size() for part in optimizer.tensors().values())
    held = config.guard.snapshot_ring * (4 * matrix.numel() + state) + 4 * matrix.numel()
    assert matrix.dtype == torch.float32
    assert state_copies(config, mode, optimizer).kept == pytest.approx(held, rel=1e-3)


def test_a_disk_too_small_for_the_checkpoints_is_said_when_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = memory.Copies(snapshots=0, best=1_000, to_save=3_000)
    config = load_config(overrides={"checkpoint.keep": 2})
    for free, is_short in ((12_000, False), (11_999, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _path, free=free: SimpleNamespace(free=free))
        assert bool(memory.disk_note(config, copies, tmp_path)) is is_short, "keep + 1 of them"
    (tmp_path / "old.safetensors").write_bytes(b"x")
    assert not memory.disk_note(config, copies, tmp_path), "an old checkpoint makes room for a new one"
