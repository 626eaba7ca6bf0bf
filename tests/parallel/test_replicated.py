"""Laws of several processes: they train the student that one process would, and none waits for ever."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from process_jobs import Child, Ended, commands, environment, losses, wait_for, weights

from stillroom.config import load_config
from stillroom.telemetry import read_events
from stillroom.training.checkpoint import CheckpointStore
from stillroom.training.distill import distill, resume

# Rows of all lengths, and windows that do not divide an epoch: the last one leaves the second process without rows.
RAGGED = {
    "data.packing": "rows",
    "data.train_share": 0.1,
    "train.max_steps": 9,
    "objectives.kd.weight": 0.7,
    "objectives.ce.weight": 0.3,
    "objectives.kd.temperature": 2.0,
    "objectives.feature.weight": 0.1,  # with a projector, which a process without rows must know of too
    "objectives.attention.weight": 0.1,
}


def settings(world: Path, **over: Any) -> dict[str, Any]:
    return tiny.settings(world) | RAGGED | {key.replace("__", "."): value for key, value in over.items()}


def arguments(world: Path, out: Path, **over: Any) -> list[str]:
    words = [word for key, value in settings(world, **over).items() for word in ("--set", f"{key}={value}")]
    return ["distill", "--out", str(out), "--device", "cpu", "--no-progress", *words]


def pair(first: Sequence[str], second: Sequence[str] | None = None, *, ends_all: bool = False) -> list[Ended]:
    """Two processes, and how each ended. `ends_all`: as torchrun does, kill the second when the first has ended."""
    started = commands([first, second or first])
    if not ends_all:
        return wait_for(started)
    try:
        return [started[0].wait(), *(_killed(child) for child in started[1:])]
    finally:
        started[0].kill()


def _killed(child: Child) -> Ended:
    child.kill()
    return child.wait()


def codes(ends: Sequence[Ended]) -> list[int]:
    return [ended.code for ended in ends]


@pytest.fixture(scope="module")
def uncut(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes train that are let alone, by one."""
    folder = tmp_path_factory.mktemp("uncut") / "run"
    distill(load_config(overrides=settings(world, train__gradient_accumulation_steps=2)), folder, device="cpu")
    return folder


def test_two_processes_train_what_one_trains_with_twice_the_accumulation(
    world: Path, tmp_path: Path, uncut: Path
) -> None:
    both = pair(arguments(world, tmp_path / "two"))
    assert codes(both) == [0, 0], both
    for key in ("train_loss", "grad_norm", "tokens"):  # the norm tells a sum from a mean; the optimizer would not
        expected, found = losses(uncut, key), losses(tmp_path / "two", key)
        assert len(found) == 9
        assert max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)) < 1e-6, key
    a, b = weights(uncut), weights(tmp_path / "two")
    assert float((a - b).norm() / a.norm()) < 1e-6
    (start,) = [event for event in read_events(tmp_path / "two" / "events.jsonl") if event["event"] == "run_start"]
    assert start["schedule"]["total_batches"] % 2 == 1 and start["schedule"]["processes"] == 2
    # One voice: each event once, and the console of one process.
    steps = [event["step"] for event in read_events(tmp_path / "two" / "events.jsonl") if event["event"] == "step"]
    assert steps == list(range(1, 10))
    assert both[0].out and not both[1].out


def test_two_processes_learn_labels_alone_beside_distilled_text_as_one_does(world: Path, tmp_path: Path) -> None:
    """A window may have labels alone in one process, in both or in none; means of a source are those of all."""
    sources = [{"path": str(tmp_path / name)} for name in ("taught.jsonl", "labels.jsonl")]
    for number, source in enumerate(sources):
        tiny.save_text(Path(source["path"]), 17 - 4 * number, seed=5 + number)
    sources[1] |= {"objectives": "labels"}
    tables = [", ".join(f'{key} = "{value}"' for key, value in source.items()) for source in sources]
    over = {"data__train_share": 1.0, "train__seed": 4, "objectives__ce__weight": 0.0}
    listed = "[" + ", ".join(f"{{{table}}}" for table in tables) + "]"
    both = pair(arguments(world, tmp_path / "two", data__train=listed, **over))
    assert codes(both) == [0, 0], both
    config = load_config(overrides=settings(world, train__gradient_accumulation_steps=2, data__train=sources, **over))
    distill(config, tmp_path / "one", device="cpu")
    for key in ("train_loss", "grad_norm", "tokens"):
        expected, found = losses(tmp_path / "one", key), losses(tmp_path / "two", key)
        assert max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)) < 1e-6, key
    kinds = set()
    steps = [
        [event for event in read_events(tmp_path / name / "events.jsonl") if event["event"] == "step"]
        for name in ("one", "two")
    ]
    for expected, found in zip(*steps, strict=True):
        assert set(found["terms"]) == set(expected["terms"])
        assert set(found["sources"]) == set(expected["sources"])
        for name, terms in expected["sources"].items():
            assert found["sources"][name] == pytest.approx(terms, rel=1e-5)
        kinds.add(tuple(sorted(Path(name).name for name in found["sources"])))
    assert len(kinds) == 3, "steps of one source, of the other and of both"
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert float((a - b).norm() / a.norm()) < 1e-6


@pytest.mark.parametrize(
    "teacher",
    [{"teacher__model": "self", "student__adapter__rank": 4}, {"teacher__model": "ema", "teacher__ema_decay": 0.5}],
    ids=["self", "ema"],
)
def test_two_processes_teach_themselves_as_one_does(world: Path, tmp_path: Path, teacher: dict[str, Any]) -> None:
    """The base under the adapter, or the average of the student, is the same in both."""
    over = {**teacher, "objectives__feature__weight": 0.0, "objectives__attention__weight": 0.0, "train__max_steps": 4}
    both = pair(arguments(world, tmp_path / "two", **over))
    assert codes(both) == [0, 0], both
    one = settings(world, train__gradient_accumulation_steps=2, **over)
    distill(load_config(overrides=one), tmp_path / "one", device="cpu")
    for key in ("train_loss", "grad_norm"):
        expected, found = losses(tmp_path / "one", key), losses(tmp_path / "two", key)
        assert max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)) < 1e-6, key
    events = read_events(tmp_path / "two" / "events.jsonl")
    taught = [event["terms"]["kd"]["raw"] for event in events if event["event"] == "step"]
    assert taught[0] == pytest.approx(0.0, abs=1e-6) and taught[-1] > 1e-6, "the student has left its teacher"


def test_two_processes_resume_bit_for_bit(world: Path, tmp_path: Path) -> None:
    """With dropout, whose random numbers differ between the processes. With another student both are refused."""
    student = tiny.save_model(tmp_path / "student", "gpt2", num_layers=1)
    over = {"student__model": str(student), "train__max_steps": 4, "eval__samples": 0}
    assert codes(pair(arguments(world, tmp_path / "whole", **over))) == [0, 0]
    stopped = pair([*arguments(world, tmp_path / "cut", **over), "--max-minutes", "1e-9"])
    assert codes(stopped) == [75, 75], stopped
    weights_file = student / "model.safetensors"
    original = weights_file.read_bytes()
    weights_file.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    refused = pair(["resume", str(tmp_path / "cut"), "--device", "cpu", "--max-minutes", "0"])
    assert codes(refused) == [25, 25], refused
    weights_file.write_bytes(original)
    resumed = pair(["resume", str(tmp_path / "cut"), "--device", "cpu", "--max-minutes", "0"])
    assert codes(resumed) == [0, 0], resumed
    assert torch.equal(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")


def check_that_no_step_is_lost(folder: Path, uncut: Path, step: int) -> None:
    """The last step before the end is on the disk, and one process goes on from it to the uncut run's weights."""
    assert CheckpointStore(folder / "checkpoints").steps()[0] == step
    resume(folder, device="cpu")
    events = list(read_events(folder / "events.jsonl"))
    assert [event["step"] for event in events if event["event"] == "resume"] == [step]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 10))
    assert losses(folder, "tokens") == losses(uncut, "tokens"), "the same rows in the same order"
    assert max(abs(a / b - 1) for a, b in zip(losses(folder), losses(uncut), strict=True)) < 1e-5
    assert float((weights(folder) - weights(uncut)).abs().max()) < 1e-5


@pytest.mark.parametrize("victim", [0, 1])
def test_whoever_is_left_after_a_kill_saves_the_last_step_and_ends(
    victim: int, world: Path, tmp_path: Path, uncut: Path
) -> None:
    words = arguments(world, tmp_path / "run")
    both = [[*words, "--inject", "kill@3"] if rank == victim else words for rank in range(2)]
    ends = pair(*both)
    assert (ends[victim].code, ends[1 - victim].code) == (-9, 75), ends
    assert len(losses(tmp_path / "run")) == 2
    check_that_no_step_is_lost(tmp_path / "run", uncut, 2)


@pytest.mark.slow
def test_a_sharded_run_whose_process_was_killed_keeps_its_newest_checkpoint(world: Path, tmp_path: Path) -> None:
    plain = {"objectives__feature__weight": 0.0, "objectives__attention__weight": 0.0}
    words = arguments(world, tmp_path / "run", train__strategy="fsdp", train__save_steps=2, **plain)
    assert codes(pair(words, [*words, "--inject", "kill@4"])) == [75, -9]
    assert len(losses(tmp_path / "run")) == 3
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps()[0] == 2
    assert resume(tmp_path / "run", device="cpu").summary["status"] == "done"


def test_a_process_whose_peer_hangs_saves_the_last_step_and_ends_within_the_timeout(
    world: Path, tmp_path: Path, uncut: Path
) -> None:
    words = arguments(world, tmp_path / "run", train__peer_timeout_minutes=0.3)
    ends = pair(words, [*words, "--inject", "freeze@3"], ends_all=True)
    assert codes(ends) == [75, -9], "the frozen process is still there, until the launcher kills it"
    check_that_no_step_is_lost(tmp_path / "run", uncut, 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchrun_goes_on_by_itself_after_a_process_was_killed(strategy: str, world: Path, tmp_path: Path) -> None:
    plain = {"objectives__feature__weight": 0.0, "objectives__attention__weight": 0.0}
    over = {"train__max_steps": 400, "train__save_steps": 10, "train__strategy": strategy, **plain}
    runner = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    job = subprocess.Popen(
        [sys.executable, "-m", *runner, "-m", "stillroom", *arguments(world, tmp_path / "run", **over)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        while job.poll() is None and not (tmp_path / "run" / "checkpoints" / "step-000020").is_dir():
            time.sleep(0.05)
        (victim,) = re.findall(r'"pid": (\d+)', (tmp_path / "run" / "run.lock").read_text())
        os.kill(int(victim), signal.SIGKILL)
        _out, told = job.communicate(timeout=400)
    finally:
        job.kill()
    assert job.returncode == 0, told[-3000:]
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 401))
    assert sum(event["event"] == "resume" for event in events) == 1


def test_a_fault_in_one_process_is_judged_alike_by_both(world: Path, tmp_path: Path) -> None:
    words = arguments(world, tmp_path / "run")
    ends = pair(words, [*words, "--inject", "oom@2,nan_grad@3,nan_weight@6"])
    assert codes(ends) == [0, 0], ends
    guards = [event["action"] for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "guard"]
    assert guards == ["skip", "rollback"]
    rows = losses(tmp_path / "run", "micro_batch_rows")
    assert rows[0] == 2 * rows[1] == 2 * rows[-1], "memory that runs out in one process makes both take smaller parts"
    assert torch.isfinite(weights(tmp_path / "run")).all()
