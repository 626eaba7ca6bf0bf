"""Rollbacks and what is on the disk: an abandoned future is never resumed, whenever the process is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from refusals import refused

from stillroom.config import load_config
from stillroom.telemetry import read_events
from stillroom.training.checkpoint import CheckpointSnapshots, CheckpointStore
from stillroom.training.distill import distill, resume
from stillroom.training.run import RunState

# Checkpoints every five steps, two of them kept, and no snapshot but the one before the first step: a fault at step 18
# goes back past every checkpoint.
SETTINGS = {
    "train__max_steps": 24,
    "train__eval_steps": 24,
    "train__save_steps": 5,
    "guard__snapshot_steps": 50,
    "eval__samples": 0,
}


def save(store: CheckpointStore, step: int) -> Path:
    return store.save(step, {"student": {"w": torch.full((4,), float(step))}}, {"state": {"applied": step}})


def kept_steps(folder: Path) -> list[int]:
    events = read_events(folder / "events.jsonl")
    return [event["step"] for event in events if event["event"] == "step" and event["verdict"] == "keep"]


def student(folder: Path) -> bytes:
    return (folder / "student" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with the same rollback and no kill."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    distill(load_config(overrides=tiny.settings(world, **SETTINGS)), folder, device="cpu", inject="nan_weight@18")
    return folder


def test_a_rollback_past_every_kept_checkpoint_goes_on(undisturbed: Path) -> None:
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary["status"] == "done" and summary["steps"] == 24 and summary["rollbacks"] == 1
    assert kept_steps(undisturbed) == [*range(1, 18), *range(1, 25)]
    assert CheckpointStore(undisturbed / "checkpoints").steps() == [24, 20]
    assert not (undisturbed / "checkpoints" / "rollback.json").exists()


@pytest.mark.parametrize("point", ["after_mark", "while_writing", "before_rename", "after_rename", "while_retiring"])
def test_a_kill_at_any_moment_of_a_rollback_resumes_what_it_went_back_to(
    world: Path, tmp_path: Path, undisturbed: Path, point: str
) -> None:
    config = load_config(overrides=tiny.settings(world, **SETTINGS))
    end = tiny.in_child(
        lambda: distill(config, tmp_path / "run", device="cpu", inject=f"nan_weight@18,kill_{point}@18")
    )
    assert end == -9
    summary = resume(tmp_path / "run", device="cpu").summary
    assert summary["rollbacks"] == 1, "a budget that is spent stays spent"
    assert kept_steps(tmp_path / "run") == kept_steps(undisturbed), "the record has both stretches, each step once"
    assert student(tmp_path / "run") == student(undisturbed)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_what_a_rollback_abandoned_is_never_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20, 30):
        save(store, step)
    store.begin_line(1, 5, {"events": 0})
    assert CheckpointStore(tmp_path).load_newest() is None, "marked, before anything new is saved"
    save(store, 5)
    newest = CheckpointStore(tmp_path).load_newest()
    assert newest is not None and newest.step == 5 and newest.line == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_what_lies_before_the_step_returned_to_stays(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (10, 20, 30):
        save(store, step)
    store.begin_line(1, 20, {"events": 0})
    newest = CheckpointStore(tmp_path).load_newest()
    assert newest is not None and newest.step == 20
    save(store, 25)
    assert CheckpointStore(tmp_path).steps() == [25, 20, 10]


def test_a_second_rollback_before_anything_was_saved_is_judged_by_its_own_mark(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (10, 20, 30):
        save(store, step)
    store.begin_line(1, 20, {"events": 0})
    store.begin_line(2, 15, {"events": 0})
    assert CheckpointStore(tmp_path).steps() == [10]


def test_replacing_a_checkpoint_of_the_same_step_never_leaves_none(tmp_path: Path) -> None:
    """Killed between the two renames, the older one is put back."""
    store = CheckpointStore(tmp_path)
    save(store, 7).rename(tmp_path / ".tmp-old-step-000007")
    (tmp_path / ".tmp-step-000007-1").mkdir()
    assert store.steps() == [] and store.sweep() == 2
    newest = store.load_newest()
    assert newest is not None and newest.step == 7
    assert [path.name for path in tmp_path.iterdir()] == ["step-000007"]


def test_a_dropped_checkpoint_that_is_saved_again_serves_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (4, 8):
        save(store, step)
    snapshots = CheckpointSnapshots(store)
    snapshots.drop_newest()
    store.begin_line(1, 4, {"events": 0})
    snapshots.settle()
    for step in (4, 8):
        save(store, step)
    newest = snapshots.newest()
    assert newest is not None and newest.step == 8 and newest.line == 1


def test_the_history_of_a_rollback_is_all_that_a_rollback_keeps(world: Path, tmp_path: Path) -> None:
    """The mark carries every counter that `restore` leaves alone."""
    from stillroom.training import run as room

    names = {name for name, _value in vars(RunState()).items()}
    assert set(room._HISTORY) <= names


def assert_events_tell_the_state(folder: Path) -> None:
    """Of each checkpoint that is kept: refused steps before it are in the log as often as the state says."""
    events = read_events(folder / "events.jsonl")
    for path in sorted((folder / "checkpoints").glob("step-*")):
        scalars: dict[str, Any] = json.loads((path / "state.json").read_text())
        before = events[: scalars["events"]]
        attempts = [event for event in before if event["event"] == "step"]
        assert len(attempts) == scalars["state"]["attempted"]
        assert sum(event["verdict"] == "skip" for event in attempts) == scalars["state"]["skipped"]


def test_a_refused_step_before_a_checkpoint_stays_in_the_record(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused attempts at step 6, then a stop: the checkpoint is of step 5 and knows of them, and so does the log."""
    from stillroom.core.errors import Interrupted
    from stillroom.training.loop import Stop

    config = load_config(overrides=tiny.settings(world, train__max_steps=10, eval__samples=1))
    wanted = iter([False] * 6 + [True])
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, False))
        with pytest.raises(Interrupted):
            distill(config, tmp_path / "run", device="cpu", inject="nan_grad@4x3")
    assert_events_tell_the_state(tmp_path / "run")
    summary = resume(tmp_path / "run", device="cpu").summary
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert summary["skipped"] == 3
    assert sum(event["event"] == "guard" for event in events) == 3
    assert_events_tell_the_state(tmp_path / "run")


def test_each_refused_attempt_at_a_step_is_kept_and_can_be_chosen(world: Path, tmp_path: Path) -> None:
    from stillroom.core.errors import ConfigError
    from stillroom.training.replay import replay

    config = load_config(overrides=tiny.settings(world, train__max_steps=10))
    distill(config, tmp_path / "run", device="cpu", inject="nan_grad@9x3")
    kept = sorted(path.name for path in (tmp_path / "run" / "quarantine").glob("*.json"))
    assert kept == [f"step-000009-attempt-{number:06d}.json" for number in (9, 10, 11)]
    with refused(ConfigError, "quarantine", "9, 10, 11"):
        replay(tmp_path / "run", 9, device="cpu")
    assert replay(tmp_path / "run", 9, attempt_number=10, device="cpu")["attempt"] == 10


def test_the_end_of_a_run_stands_once_in_the_record(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the samples were written, before the summary was."""
    from stillroom.training import finish as room

    config = load_config(overrides=tiny.settings(world, eval__samples=1))
    with monkeypatch.context() as patch:

        def fail(*_args: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(room, "write_summary", fail)
        with pytest.raises(KeyboardInterrupt):
            distill(config, tmp_path / "run", device="cpu")
    resume(tmp_path / "run", device="cpu")
    events = [event["event"] for event in read_events(tmp_path / "run" / "events.jsonl")]
    assert events.count("sample") == 1 and events.count("first_forward") == 1
    assert events.count("checkpoint") == 2, "steps 4 and 8, each once"
