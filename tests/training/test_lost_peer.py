"""Laws of the last checkpoint after a lost process: one of those that are left writes it, of a state that is whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from stillroom.core.errors import PeerGone
from stillroom.core.locks import RUN_LOCK, hold
from stillroom.parallel import Parallel
from stillroom.telemetry import SilentLog, read_events
from stillroom.training.checkpoint import CheckpointStore
from stillroom.training.run import Hooks, Run, RunState, weights_of
from stillroom.training.save import last_step_saved
from stillroom.training.step import train_step


class Left(Parallel):
    """A process whose peers are gone: whatever it asks them raises."""

    def __init__(self, rank: int, *, is_sharded: bool = False) -> None:
        self.rank, self.size, self.is_sharded = rank, 2, is_sharded

    def worst(self, value: float) -> float:
        raise PeerGone("another process is gone")

    broadcast = worst


@pytest.fixture
def begun(make_run: Any) -> Callable[..., tuple[Run, RunState]]:
    """A run after two steps, with the log of its first process, as a process sees it that is left."""

    def build(rank: int, **over: Any) -> tuple[Run, RunState]:
        run, state = make_run(train__max_steps=9), RunState()
        state.reach.begin(run)
        for index in range(2):
            outcome = train_step(run, state, run.loader.window(index))
            run.log.write("step", step=state.applied, verdict=outcome.verdict.action)
        shutil.copy(run.log.path, run.folder / "events.jsonl")
        log = run.log if rank == 0 else SilentLog()
        return replace(run, parallel=Left(rank, **over), log=log), state

    return build


def lose_a_peer(run: Run, state: RunState) -> None:
    with pytest.raises(PeerGone), last_step_saved(run, state):
        run.parallel.any_of(False)


def steps_saved(run: Run) -> list[int]:
    return CheckpointStore(run.folder / "checkpoints").steps()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_process_that_is_left_saves_the_last_step(begun: Any, rank: int) -> None:
    run, state = begun(rank)
    lose_a_peer(run, state)
    saved = run.checkpoints.load_newest()
    assert saved is not None and saved.step == 2 and saved.scalars["events"] > 0
    for name, tensor in weights_of(run.student.model).items():
        assert torch.equal(tensor, saved.tensors["student"][name]), name
    if rank == 1:
        events = [event["event"] for event in read_events(run.folder / "events.jsonl") if event["event"] != "stage"]
        assert events[2:] == ["checkpoint", "note", "run_end"], "it writes the log in place of the first one"
        assert not (run.folder / RUN_LOCK).exists()


def test_only_one_of_those_that_are_left_saves(begun: Any) -> None:
    run, state = begun(1)
    with hold(run.folder / RUN_LOCK):  # as another process would
        lose_a_peer(run, state)
        assert steps_saved(run) == [], "the first process holds the lock: it is there, or frozen"
    lose_a_peer(run, state)
    assert steps_saved(run) == [2]
    before = (run.folder / "events.jsonl").read_bytes()
    lose_a_peer(replace(run, parallel=Left(2)), state)
    assert (run.folder / "events.jsonl").read_bytes() == before, "a third one finds that it is saved"


class LosesPeer(Hooks):
    def mid_update(self) -> None:
        raise PeerGone("another process is gone")


def test_a_state_that_is_not_whole_is_not_saved(begun: Any) -> None:
    run, state = begun(0)
    alone = replace(run, parallel=Parallel(), hooks=LosesPeer())
    with pytest.raises(PeerGone), last_step_saved(run, state):  # weights of the third step, counters of the second
        train_step(alone, state, run.loader.window(2))
    assert state.applied == 2 and steps_saved(run) == []

    sharded, state = begun(0, is_sharded=True)
    lose_a_peer(sharded, state)
    assert steps_saved(sharded) == [], "the parts of the lost process are gone"

    ahead, state = begun(1)
    train_step(replace(ahead, parallel=Parallel()), state, ahead.loader.window(2))
    lose_a_peer(ahead, state)
    assert steps_saved(ahead) == [], "the log does not tell of the third step"

    bad, state = begun(0)
    with torch.no_grad():
        next(iter(weights_of(bad.student.model).values())).view(-1)[0] = float("nan")
    lose_a_peer(bad, state)
    assert steps_saved(bad) == []
    assert "does not pass its checks" in read_events(bad.log.path)[-1]["text"]
