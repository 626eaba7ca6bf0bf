"""Laws of memory that runs out: the window is taken again in smaller parts and gives the same numbers."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from safetensors.torch import load_file

from stillroom.config import load_config
from stillroom.core.errors import ConfigError, Interrupted, OutOfMemory
from stillroom.core.types import Batch
from stillroom.doctor.plan.plan import find_target
from stillroom.parallel import Parallel
from stillroom.precision.gpus import find_gpu
from stillroom.telemetry import EventLog, read_events
from stillroom.training import memory
from stillroom.training.distill import distill, resume
from stillroom.training.finish import Result
from stillroom.training.memory import AIM, Shapes, lay_out
from stillroom.training.run import RunState
from stillroom.training.trace import Untraceable


def settings(world: Path, **over: Any) -> dict[str, Any]:
    return tiny.settings(world, **{"train__max_steps": 12, "train__eval_steps": 6, "train__batch_size": 4, **over})


def run(world: Path, out: Path, inject: str = "", **over: Any) -> Result:
    return distill(load_config(overrides=settings(world, **over)), out, device="cpu", inject=inject)


def steps(result: Result) -> list[dict[str, Any]]:
    return [event for event in read_events(result.folder / "events.jsonl") if event["event"] == "step"]


def weights(result: Result) -> dict[str, torch.Tensor]:
    return load_file(result.folder / "student" / "model.safetensors")


def test_windows_that_ran_out_of_memory_equal_the_undisturbed_run(world: Path, tmp_path: Path) -> None:
    over = {"train__max_steps": 30, "train__eval_steps": 15, "train__batch_size": 8}
    plain = run(world, tmp_path / "plain", **over)
    short = run(world, tmp_path / "short", "oom@6,oom@12,oom@23", **over)
    mine, theirs = [event["train_loss"] for event in steps(short)], [event["train_loss"] for event in steps(plain)]
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-6, atol=1e-6)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(short)[name], tensor, rtol=1e-4, atol=1e-6)
    assert [event["micro_batch_rows"] for event in steps(short)] == 5 * [8] + 6 * [4] + 11 * [2] + 8 * [1]
    assert short.summary["shortages"] == 3 and short.summary["micro_batch_rows"] == 1
    assert short.summary["skipped"] == short.summary["retried"] == short.summary["rollbacks"] == 0


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-master", "fp16-split"])
def test_a_half_precision_run_goes_on_in_smaller_parts(world: Path, tmp_path: Path, precision: str) -> None:
    plain = run(world, tmp_path / "plain", precision__mode=precision)
    short = run(world, tmp_path / "short", "oom@3x2", precision__mode=precision)
    assert short.summary["shortages"] == 2 and short.summary["micro_batch_rows"] == 1
    assert len(steps(short)) == len(steps(plain)), "running out of memory is no attempt"
    for one, other in zip(steps(short), steps(plain), strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=2e-2)


def test_the_size_that_fits_is_kept_when_a_run_is_resumed(world: Path, tmp_path: Path) -> None:
    def stop_after_five(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    config = load_config(overrides=settings(world))
    with pytest.raises(Interrupted):
        distill(config, tmp_path / "run", device="cpu", inject="oom@2", listeners=(stop_after_five,))
    resumed = resume(tmp_path / "run", device="cpu")
    whole = run(world, tmp_path / "whole", "oom@2")
    assert [event["train_loss"] for event in steps(resumed)] == [event["train_loss"] for event in steps(whole)]
    assert [event["micro_batch_rows"] for event in steps(resumed)] == [4] + 11 * [2]
    assert resumed.summary["shortages"] == 1


def test_a_row_that_does_not_fit_ends_with_20_and_says_what_is_missing(world: Path, tmp_path: Path) -> None:
    with refused(OutOfMemory, "cpu", "512 MiB") as caught:
        run(world, tmp_path / "run", "oom@5x9")
    assert caught.value.exit_code == 20
    assert any("gradient_checkpointing" in advice for advice in caught.value.advice)
    last = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "run_end"][-1]
    assert last["exit_code"] == 20


def test_other_errors_of_a_step_are_not_taken_for_a_lack_of_memory(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault of another kind")

    monkeypatch.setattr("stillroom.training.step._learn", fail)
    with pytest.raises(RuntimeError, match="another kind"):
        run(world, tmp_path / "run")


def test_auto_takes_the_rows_of_a_step_in_parts_that_fit(world: Path, tmp_path: Path) -> None:
    auto = run(world, tmp_path / "auto", train__batch_size="auto", train__step_rows=16)
    plain = run(world, tmp_path / "plain", train__batch_size=16)
    assert [event["train_loss"] for event in steps(auto)] == pytest.approx(
        [event["train_loss"] for event in steps(plain)], rel=1e-5
    )
    assert auto.summary["micro_batch_rows"] == 8 and auto.summary["shortages"] == 0


def test_auto_decides_the_accumulation_itself(world: Path) -> None:
    over = settings(world, train__batch_size="auto", train__gradient_accumulation_steps=2)
    with refused(ConfigError, "", "step_rows"):
        load_config(overrides=over)


def test_parts_of_a_batch_hold_each_row_once() -> None:
    rows, length = 5, 7
    ids = torch.arange(rows * length).reshape(rows, length)
    batch = Batch(ids, torch.ones_like(ids), ids + 1, torch.ones_like(ids), tuple("abcde"), documents=tuple("vwxyz"))
    for num_parts in range(1, 8):
        parts = list(batch.parts(num_parts))
        assert len(parts) <= num_parts
        assert torch.equal(torch.cat([part.input_ids for part in parts]), ids)
        assert sum((part.sample_ids for part in parts), ()) == batch.sample_ids
        assert sum((part.documents for part in parts), ()) == batch.documents
        assert sum((part.keys for part in parts), ()) == batch.keys


def test_memory_that_runs_out_beside_other_faults_leaves_a_finite_student(world: Path, tmp_path: Path) -> None:
    result = run(world, tmp_path / "run", "oom@3,nan_grad@3,teacher_nan@5,oom@8,nan_weight@8")
    assert result.summary["shortages"] == 2 and result.summary["skipped"] == 1 and result.summary["rollbacks"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in weights(result).values())


# ---- The model of memory is asked how far to cut


def small_run(world: Path, log: EventLog, rows: int) -> Any:
    """What the handler reads of a run on a GPU, which is not here."""
    config = load_config(overrides=settings(world, train__batch_size=rows))
    optimizer = SimpleNamespace(zero_grad=lambda: None)
    mix = SimpleNamespace(planned=SimpleNamespace(find=lambda _name: None))
    return SimpleNamespace(
        config=config, device=torch.device("cuda"), precision=SimpleNamespace(mode="fp32"), optimizer=optimizer,
        mix=mix, parallel=Parallel(), log=log,
    )  # fmt: skip


def test_a_size_that_the_model_of_memory_rules_out_is_not_tried(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = find_target(gpu=find_gpu("T4"))
    with EventLog(tmp_path / "events.jsonl") as log:
        run, state = small_run(world, log, rows=16), RunState()
        needed = lay_out(run.config, Shapes(gpu), "fp32", rows=2).total
        monkeypatch.setattr(memory, "held_here", lambda _device, _sharing: replace(gpu, bound=int(needed / AIM) + 1))
        memory._take_smaller_parts(run, state, "no memory")
    assert (state.micro_batch_parts, state.shortages) == (8, 1)
    (note,) = read_events(log.path)
    assert note["micro_batch_rows"] == 2


def test_where_the_model_of_memory_cannot_say_half_is_tried_and_that_is_noted(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any, **__: Any) -> int:
        raise Untraceable("no shapes")

    monkeypatch.setattr(memory, "held_here", lambda _device, _sharing: find_target(gpu=find_gpu("T4")))
    monkeypatch.setattr(memory, "parts_that_fit", unknown)
    with EventLog(tmp_path / "events.jsonl") as log:
        run, state = small_run(world, log, rows=16), RunState()
        memory._take_smaller_parts(run, state, "no memory")
    assert state.micro_batch_parts == 2
    assert [event["event"] for event in read_events(log.path)] == ["note", "note"]
