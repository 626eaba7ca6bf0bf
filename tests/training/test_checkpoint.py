"""What is on disk: full disks, foreign files, and names that try to escape."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
import torch
from process_jobs import alone
from refusals import refused

from stillroom.config import load_config
from stillroom.core.errors import BrokenAtStart, CannotSave, CheckpointUnusable, Interrupted
from stillroom.telemetry import EventLog, read_events
from stillroom.training.checkpoint import CheckpointStore
from stillroom.training.distill import distill, resume


def save(store: CheckpointStore, step: int) -> Path:
    return store.save(step, {"student": {"w": torch.full((4,), float(step))}}, {"state": {"applied": step}})


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        save(store, step)
    assert store.steps() == [3, 2]


def test_folders_that_are_not_ours_are_never_pruned(tmp_path: Path) -> None:
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "thesis.tex").write_text("x")
    (tmp_path / "other").mkdir()
    store = CheckpointStore(tmp_path, keep=1)
    for step in (2, 3):
        save(store, step)
    assert (tmp_path / "step-000001" / "thesis.tex").exists() and (tmp_path / "other").exists()


def test_a_symlinked_checkpoint_is_not_read(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path / "elsewhere"), 7)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "step-000007").symlink_to(tmp_path / "elsewhere" / "step-000007")
    assert CheckpointStore(tmp_path / "here").load_newest() is None


def test_a_manifest_cannot_name_files_outside(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../secret"] = {"sha256": "0" * 64, "bytes": 1}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with refused(CheckpointUnusable, "", "../../secret"):
        store.load_newest()


def test_a_failed_save_leaves_the_older_checkpoint_loadable(tmp_path: Path) -> None:
    def full(point: str) -> None:
        if point == "before_rename":
            raise OSError(28, os.strerror(28))

    save(CheckpointStore(tmp_path), 1)
    with pytest.raises(CannotSave) as caught:
        save(CheckpointStore(tmp_path, at_point=full), 2)
    assert caught.value.exit_code == 24
    newest = CheckpointStore(tmp_path).load_newest()
    assert newest is not None and newest.step == 1
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_run_short_of_memory_rolls_back_to_a_checkpoint(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Little:
        available = 1000
        total = 10**9

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Little)
    over = {"train.max_steps": 12, "train.eval_steps": 4}
    config = load_config(overrides={**tiny.settings(world), **over})
    result = distill(config, tmp_path / "run", device="cpu", inject="nan_weight@7")
    steps = [
        e["step"]
        for e in read_events(result.folder / "events.jsonl")
        if e["event"] == "step" and e["verdict"] == "keep"
    ]
    assert steps == [1, 2, 3, 4, 5, 6, *range(5, 13)]


def test_a_student_that_cannot_be_written_ends_with_24_and_can_be_finished_later(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedModel

    config = load_config(overrides=tiny.settings(world))
    with monkeypatch.context() as patch:

        def full(*_args: Any, **_options: Any) -> None:
            raise OSError(28, os.strerror(28))

        patch.setattr(PreTrainedModel, "save_pretrained", full)
        with pytest.raises(CannotSave) as caught:
            distill(config, tmp_path / "run", device="cpu")
    assert caught.value.exit_code == 24
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [8], "older ones made room"
    assert resume(tmp_path / "run", device="cpu").summary["status"] == "done"


def test_events_wait_for_room_on_a_full_disk(tmp_path: Path) -> None:
    """With a real limit on file size: the run goes on, and no line is torn or lost."""

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with EventLog(tmp_path / "events.jsonl") as log:
            log.write("step", step=1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
            for step in range(2, 50):
                log.write("step", step=step)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            log.write("step", step=50)

    alone(write)
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")] == list(range(1, 51))


def test_a_time_limit_saves_and_ends_with_75(world: Path, tmp_path: Path) -> None:
    over = {"train.max_minutes": 1e-6, "train.max_steps": 50}
    with pytest.raises(Interrupted) as caught:
        distill(load_config(overrides={**tiny.settings(world), **over}), tmp_path / "run", device="cpu")
    assert caught.value.exit_code == 75 and "time limit" in caught.value.what
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps()[0] == 1


# -- foreign files ---------------------------------------------------------------------------------------


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def test_a_pickled_model_is_refused_and_does_not_run(world: Path, tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    stream = io.BytesIO()
    pickle.Pickler(stream).dump({"x": Malicious(tmp_path / "owned")})
    (folder / "pytorch_model.bin").write_bytes(stream.getvalue())
    config = load_config(overrides={**tiny.settings(world), "teacher.model": str(folder)})
    with pytest.raises(BrokenAtStart):
        distill(config, tmp_path / "run", device="cpu")
    assert not (tmp_path / "owned").exists()


def test_code_that_comes_with_a_model_is_not_run(world: Path, tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    settings = load_config(overrides={**tiny.settings(world), "teacher.model": str(folder)})
    with pytest.raises(BrokenAtStart):
        distill(settings, tmp_path / "run", device="cpu")
    assert not (tmp_path / "owned").exists()


def test_the_log_survives_a_listener_s_file(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("note", text="</script>\x1b[31m")
    assert read_events(tmp_path / "events.jsonl")[0]["text"] == "</script>\x1b[31m"
