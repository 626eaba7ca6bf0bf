"""Laws of saves in the background: what is written is the step it began at, whatever training does meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from stillroom.config import load_config
from stillroom.core.errors import CannotSave
from stillroom.core.types import Verdict
from stillroom.telemetry import read_events
from stillroom.training.checkpoint import CheckpointStore, no_save_left, settle, tell_finished
from stillroom.training.distill import distill, resume
from stillroom.training.faults import Injector
from stillroom.training.recover import carry_out, take_snapshot
from stillroom.training.run import Run, RunState, capture, weights_of
from stillroom.training.run_folder import take_lock
from stillroom.training.save import save_checkpoint
from stillroom.training.step import train_step


class Gate:
    """Holds the thread of a save where it writes, until it is opened."""

    def __init__(self, run: Run) -> None:
        self.is_open, self.is_reached = threading.Event(), threading.Event()
        run.checkpoints.at_point = self

    def __call__(self, point: str) -> None:
        if point == "while_writing":
            self.is_reached.set()
            assert self.is_open.wait(60)

    def open_soon(self) -> None:
        threading.Timer(0.05, self.is_open.set).start()


@pytest.fixture
def begun(make_run: Any) -> Callable[..., tuple[Run, RunState]]:
    """A run after two steps."""

    def build(**over: Any) -> tuple[Run, RunState]:
        run, state = make_run(**({"checkpoint__background": "on"} | over)), RunState()
        state.reach.begin(run)
        for index in range(2):
            train_step(run, state, run.loader.window(index))
        return run, state

    return build


def checkpoints_told(run: Run) -> list[dict[str, Any]]:
    return [event for event in read_events(run.log.path) if event["event"] == "checkpoint"]


@pytest.mark.parametrize("precision", ["fp32", "fp16-split"])
def test_the_bytes_are_those_of_a_save_that_training_waited_for(begun: Any, tmp_path: Path, precision: str) -> None:
    run, state = begun(precision__mode=precision)
    state.best_weights = {name: tensor.clone() for name, tensor in weights_of(run.student.model).items()}
    awaited = CheckpointStore(tmp_path / "awaited")
    saved = capture(run, state)
    expected = awaited.save(saved.step, saved.tensors, saved.scalars)
    gate = Gate(run)
    save_checkpoint(run, state)
    assert gate.is_reached.wait(60)
    train_step(run, state, run.loader.window(2))
    with torch.no_grad():
        for tensor in weights_of(run.student.model).values():
            tensor.fill_(7)
    run.guard.consecutive = 5
    assert run.checkpoints.steps() == [] and not checkpoints_told(run), "nothing is said of what is not whole"
    gate.is_open.set()
    settle(run, state)
    (event,) = checkpoints_told(run)
    found = run.folder / event["path"]
    assert event["step"] == saved.step == 2 and 0 <= event["waited_seconds"] <= event["seconds"]
    names = sorted(path.name for path in expected.iterdir())
    assert names == sorted(path.name for path in found.iterdir()) and "best.safetensors" in names
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


def test_the_next_save_waits_for_the_one_in_flight_and_counts_the_wait(begun: Any) -> None:
    run, state = begun()
    gate = Gate(run)
    save_checkpoint(run, state)
    train_step(run, state, run.loader.window(2))
    tell_finished(run, state)
    assert not checkpoints_told(run)
    gate.open_soon()
    save_checkpoint(run, state)
    settle(run, state)
    first, second = checkpoints_told(run)
    assert (first["step"], second["step"]) == (2, 3)
    assert 0 < first["waited_seconds"] <= first["seconds"]


def test_a_rollback_waits_for_the_save_in_flight(begun: Any) -> None:
    run, state = begun()
    assert take_snapshot(run, state)
    gate = Gate(run)
    save_checkpoint(run, state)
    outcome = train_step(run, state, run.loader.window(2))
    gate.open_soon()
    carry_out(run, state, [], outcome.evidence, Verdict("rollback", "as a test asked for"))
    assert run.checkpoints.steps() == [2] and run.saves.current is None
    assert state.applied == 2


@pytest.mark.parametrize("error", [OSError(28, os.strerror(28)), MemoryError("no memory")])
def test_an_error_in_the_thread_is_the_runs_and_costs_no_checkpoint(begun: Any, error: Exception) -> None:
    run, state = begun()
    save_checkpoint(run, state, is_awaited=True)
    train_step(run, state, run.loader.window(2))

    def fail(point: str) -> None:
        raise error

    run.checkpoints.at_point = fail
    save_checkpoint(run, state)
    if isinstance(error, OSError):
        settle(run, state)
        notes = [event["text"] for event in read_events(run.log.path) if event["event"] == "note"]
        assert "cannot write the checkpoint of step 3: No space left on device; the run continues" in notes[-1]
    else:
        with pytest.raises(MemoryError):
            settle(run, state)
    run.checkpoints.at_point = lambda _point: None
    assert [path.name for path in run.checkpoints.folder.glob("step-*")] == ["step-000002"]
    assert state.saved_at == ()
    save_checkpoint(run, state)
    settle(run, state)
    assert run.checkpoints.steps() == [3, 2], "the same state is saved when it is asked for again"


@pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError])
def test_no_save_outlives_the_run(begun: Any, end: type[BaseException]) -> None:
    """An error waits for the save in flight. A second Ctrl-C does not: it is given up."""
    run, state = begun()
    gate = Gate(run)
    save_checkpoint(run, state)
    save = run.saves.current
    if end is RuntimeError:
        gate.open_soon()
    with pytest.raises(end), no_save_left(run, state):
        raise end
    assert run.checkpoints.steps() == ([2] if end is RuntimeError else [])
    gate.is_open.set()
    save.wait()
    assert run.checkpoints.steps() == ([2] if end is RuntimeError else [])
    assert not list(run.checkpoints.folder.glob(".*"))
    assert len(checkpoints_told(run)) == (end is RuntimeError)


def test_a_kill_while_training_goes_on_leaves_the_checkpoint_before_and_resumes_bit_for_bit(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(overrides=tiny.settings(world, train__save_steps=2, eval__samples=0))
    distill(config, tmp_path / "whole", device="cpu")

    def strike(self: Injector, point: str) -> None:
        """While step 4 is written, as soon as step 5 was taken."""
        log = tmp_path / "run" / "events.jsonl"
        while self._saved_after == 4 and point == "before_rename":
            if log.read_text().count('"verdict": "keep"') >= 5:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)

    with monkeypatch.context() as patch:
        patch.setattr(Injector, "checkpoint_point", strike)
        end = tiny.in_child(lambda: distill(config, tmp_path / "run", device="cpu", inject="lr_spike@99"))
    assert end == -9
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [2]
    assert list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))
    resume(tmp_path / "run", device="cpu")
    one, other = ((tmp_path / name / "student" / "model.safetensors").read_bytes() for name in ("whole", "run"))
    assert one == other
    steps = [event["step"] for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "step"]
    assert steps == list(range(1, 9))
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))


@pytest.mark.parametrize("point", ["while_writing", "before_rename", "after_rename", "written"])
def test_a_folder_replaced_during_a_save_ends_the_run_with_24(begun: Any, tmp_path: Path, point: str) -> None:
    run, state = begun()
    folder = tmp_path / "run"
    folder.mkdir()
    store = CheckpointStore(folder / "checkpoints")
    run = replace(run, folder=folder, checkpoints=store, lock=take_lock(folder))

    def replace_folder(reached: str) -> None:
        if reached == point:
            folder.rename(tmp_path / "away")
            folder.mkdir()

    store.at_point = replace_folder
    if point == "written":
        save = store.save
        store.save = lambda *given: (save(*given), replace_folder("written"))[0]  # type: ignore[method-assign]
    save_checkpoint(run, state)
    with pytest.raises(CannotSave):
        settle(run, state)
    assert list(folder.iterdir()) == []
