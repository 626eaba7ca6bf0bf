"""Laws of checkpoints in parts: sealed and read back like whole ones, whoever reads them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from refusals import refused
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from stillroom.core.errors import CannotSave, CheckpointUnusable
from stillroom.parallel import Parallel, shards
from stillroom.parallel.base import Processes
from stillroom.training.checkpoint import CheckpointStore, Saved

WHOLE = torch.arange(15.0).reshape(5, 3)


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def save(store: CheckpointStore, step: int, mesh: Any) -> None:
    tensors: dict[str, dict[str, Tensor]] = {
        "student": {"a.weight": distribute_tensor(WHOLE + step, mesh, [Shard(0)]), "flag": torch.tensor([step])},
        "random": {"cpu": torch.arange(7, dtype=torch.uint8)},
    }
    store.save_parts(step, tensors, {"state": {"step": step}}, Parallel())


def test_parts_are_read_whole_and_into_what_a_process_holds(mesh: Any, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 3, mesh)
    saved = store.load_newest()
    assert saved is not None and saved.step == 3 and saved.scalars == {"state": {"step": 3}}
    assert set(saved.tensors) == {"student", "random"} and set(saved.tensors["student"]) == {"a.weight", "flag"}
    assert torch.equal(saved.tensors["student"]["a.weight"], WHOLE + 3)
    assert torch.equal(saved.tensors["random"]["cpu"], torch.arange(7, dtype=torch.uint8))
    part = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)])
    present = {"a.weight": part, "flag": torch.zeros(1, dtype=torch.int64)}
    Parallel().load("student", present, saved.tensors["student"])
    assert torch.equal(part.to_local(), WHOLE + 3) and present["flag"].item() == 3
    with pytest.raises(ValueError, match="other tensors: a"):
        Parallel().load("student", {"flag": torch.zeros(1)}, saved.tensors["student"])


def test_parts_that_a_thread_writes_from_a_copy_are_those_of_the_step_they_were_copied_at(
    mesh: Any, tmp_path: Path
) -> None:
    store, part = CheckpointStore(tmp_path / "checkpoints"), distribute_tensor(WHOLE + 3, mesh, [Shard(0)])
    best = distribute_tensor(WHOLE, mesh, [Shard(0)])
    saved = Saved(3, {"student": {"a.weight": part}, "best": {"a.weight": best}}, {"state": {}}).copied(but=("best",))
    part.to_local().fill_(0)
    assert saved.tensors["best"]["a.weight"].to_local().data_ptr() == best.to_local().data_ptr(), "not copied again"
    processes = Processes(0, 1)
    beside = processes.beside()
    assert beside.group is not None and processes.group is None
    with ThreadPoolExecutor() as pool:
        work = pool.submit(store.save_parts, saved.step, saved.tensors, saved.scalars, beside)
        processes.wait()  # messages of this thread are of another group
        work.result()
    found = store.load_newest()
    assert found is not None and torch.equal(found.tensors["student"]["a.weight"], WHOLE + 3)
    assert torch.equal(found.tensors["best"]["a.weight"], WHOLE)


def test_joining_the_student_takes_a_few_buffers_and_never_the_whole(
    mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what a process holds: a file that is written, and the tensor that is joined."""
    monkeypatch.setattr(shards, "_FILE_BYTES", 1 << 20)
    whole = {f"{number}.weight": torch.full((512, 256), float(number)) for number in range(16)}  # half a MB each
    parts = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    shards.write_whole(tmp_path, {"0.weight": parts["0.weight"]}, Parallel())  # imports are not counted
    (tmp_path / shards.WHOLE_FILE).unlink()
    tracemalloc.start()  # bytes that are written and read
    try:
        with LiveBytes() as live:  # tensors
            shards.write_whole(tmp_path, parts, Parallel())
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert live.peak + peak < 4 << 20 < sum(tensor.nbytes for tensor in whole.values()) / 1.9
    found = load_file(tmp_path / shards.WHOLE_FILE)
    assert set(found) == set(whole) and all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_checkpoint_in_several_files_a_process_is_one_checkpoint(
    num_files: int, mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_FILE_BYTES", 1 if num_files > 1 else 1 << 28)
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 3, mesh)
    files = list((tmp_path / "checkpoints" / "step-000003").glob("shard-*.safetensors"))
    saved = store.load_newest()
    assert len(files) == num_files and saved is not None
    assert torch.equal(saved.tensors["student"]["a.weight"], WHOLE + 3)
    assert saved.tensors["student"]["flag"].item() == 3
    sizes = {"a": torch.zeros(8), "b": torch.zeros(1), "c": torch.zeros(1)}
    numbers = [1, 2, 2] if num_files > 1 else [1, 1, 1]
    assert list(shards._in_files(sizes, most=2).values()) == numbers


@pytest.mark.parametrize("harm", ["flipped", "missing", "added"])
def test_a_damaged_part_makes_the_checkpoint_before_count(harm: str, mesh: Any, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 1, mesh)
    save(store, 2, mesh)
    (part,) = (tmp_path / "checkpoints" / "step-000002").glob("shard-*.safetensors")
    if harm == "flipped":
        contents = bytearray(part.read_bytes())
        contents[-1] ^= 1
        part.write_bytes(contents)
    elif harm == "missing":
        part.unlink()
    else:
        part.with_name("shard-00002-model-00001-of-00001.safetensors").write_bytes(part.read_bytes())
    saved = store.load_newest()
    assert saved is not None and saved.step == 1 and len(saved.rejected) == 1
    part_before = next((tmp_path / "checkpoints" / "step-000001").glob("shard-*.safetensors"))
    part_before.unlink()
    with pytest.raises(CheckpointUnusable):
        store.load_newest()


def test_a_save_that_fails_leaves_the_checkpoint_before_and_nothing_else(mesh: Any, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 1, mesh)

    def full(point: str) -> None:
        if point == "while_writing":
            raise OSError(28, "No space left on device")

    store.at_point = full
    with refused(CannotSave, "checkpoints", "step 2"):
        save(store, 2, mesh)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
