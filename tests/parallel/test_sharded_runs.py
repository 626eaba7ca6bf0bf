"""Laws of strategies: whatever each process holds of the student, all train the one that one process would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import process_runs
import pytest
import tiny
import torch
import torch.distributed as dist
from process_jobs import group, losses, weights
from refusals import refused
from transformers import AutoModelForCausalLM

from stillroom.config import load_config
from stillroom.core.errors import BrokenAtStart, ConfigError, Diverged
from stillroom.parallel import fsdp
from stillroom.telemetry import read_events
from stillroom.training.checkpoint import CheckpointStore
from stillroom.training.distill import distill, resume

# Rows of all lengths; the last window of an epoch leaves processes without rows.
PLAIN = {
    "data.packing": "rows",
    "data.train_share": 0.1,
    "train.batch_size": 2,
    "train.max_steps": 6,
    "train.save_steps": 2,
    "objectives.kd.weight": 0.7,
    "objectives.ce.weight": 0.3,
    "objectives.kd.temperature": 2.0,
}
STEPS = PLAIN["train.max_steps"]
INNER = {"objectives.feature.weight": 0.1, "objectives.attention.weight": 0.1, "train.max_steps": 2}


IN_PARTS = ("fsdp-2-parts", "ddp-2")


def settings(world: Path, accumulation: int, **over: Any) -> dict[str, Any]:
    return tiny.settings(world, train__gradient_accumulation_steps=accumulation) | PLAIN | over


def in_processes(num_processes: int, cases: list[dict[str, Any]], folder: Path) -> list[list[list[Any]]]:
    """How each case ended in each process."""
    path = folder / f"cases-{num_processes}.json"
    path.write_text(json.dumps(cases))
    group(num_processes, lambda: process_runs.main(path))
    ends = [json.loads(path.with_suffix(f".{rank}.json").read_bytes()) for rank in range(num_processes)]
    return [list(case) for case in zip(*ends, strict=True)]


def codes(ends: list[list[Any]]) -> set[int]:
    return {code for code, _said in ends}


def compare(expected: Path, found: Path, steps: int = STEPS) -> None:
    for key in ("train_loss", "grad_norm", "tokens"):
        one, other = losses(expected, key), losses(found, key)
        assert len(other) == steps
        assert max(abs(a / b - 1) for a, b in zip(other, one, strict=True)) < 1e-6, (key, found.name)
    one, other = weights(expected), weights(found)
    # Where a gradient is near AdamW's epsilon, the order of FP32 sums moves a single weight by more than the others.
    assert float((one - other).abs().max()) < 3e-5, found.name
    assert float((one - other).norm() / one.norm()) < 1e-5, found.name


@pytest.fixture
def deep_world(world: Path, tmp_path: Path) -> Path:
    """With a student of two layers and a head of its own."""
    for name in ("teacher", "train.jsonl"):
        (tmp_path / name).symlink_to(world / name)
    tiny.save_model(tmp_path / "student", "llama", width=32, num_layers=2, seed=2)
    return tmp_path


@pytest.mark.slow
def test_one_two_and_four_processes_train_one_student_and_take_over_from_each_other(deep_world: Path) -> None:
    world = deep_world
    at = {name: deep_world / name for name in ("one", "half", "cut", "ddp-cut", "from-cut", "hsdp-cut", "from-hsdp")}
    copies = {"train.strategy": "fsdp", "train.shard_size": 2}
    parts = {"teacher.placement": "shard"}
    store = f"file://{world}/store/run"
    two = [
        {"out": str(world / "ddp-2"), "set": settings(world, 2, **parts, **{"train.strategy": "ddp"})},
        {
            "out": str(world / "fsdp-2"),
            "set": settings(world, 2, **{"train.strategy": "fsdp", "checkpoint.background": "on"}),
            "inject": {"1": "disk_full@2"},
        },
        {
            "out": str(world / "awaited"),
            "set": settings(world, 2, **{"train.strategy": "fsdp", "checkpoint.background": "off"}),
        },
        {"out": str(world / "half-2"), "set": settings(world, 2, **{"precision.mode": "fp16-master"})},
        {"out": str(at["cut"]), "set": settings(world, 2, **{"train.strategy": "fsdp", "train.max_minutes": 1e-9})},
        {"out": str(at["ddp-cut"]), "set": settings(world, 2, **{"train.max_minutes": 1e-9})},
        {"out": str(world / "cut-ddp-2"), "resumes": str(at["cut"]), "strategy": "ddp"},
        {"out": str(world / "ddp-cut-fsdp-2"), "resumes": str(at["ddp-cut"]), "strategy": "fsdp"},
        {"out": str(world / "fsdp-2-parts"), "set": settings(world, 2, **parts, **{"train.strategy": "fsdp"})},
        {"out": str(world / "inner"), "set": settings(world, 2, **INNER)},
        {"out": str(world / "inner-parts"), "set": settings(world, 2, **INNER, **parts)},
        {
            "out": str(world / "spoilt"),
            "set": settings(world, 2, **{"train.strategy": "fsdp", "precision.mode": "fp16-mixed"}),
            "inject": {"1": "inf_logit@3,nan_weight@5"},
        },
        {
            "out": store, "home": str(world / "machine-1"),
            "set": settings(world, 2, **{"train.strategy": "fsdp", "train.max_minutes": 1e-9}),
        },
        {"out": store, "home": str(world / "machine-2"), "resumes": store, "strategy": "fsdp"},
    ]  # fmt: skip
    ends = in_processes(2, two, world)
    assert [codes(case) for case in ends] == [{0}] * 4 + [{75}] * 2 + [{0}] * 6 + [{75}, {0}], ends
    four = [
        {"out": str(world / "ddp-4"), "set": settings(world, 1)},
        {"out": str(world / "fsdp-4"), "set": settings(world, 1, **{"train.strategy": "fsdp"})},
        {"out": str(world / "cut-fsdp-4"), "resumes": str(at["cut"]), "strategy": "fsdp"},
        {"out": str(world / "ddp-cut-fsdp-4"), "resumes": str(at["ddp-cut"]), "strategy": "fsdp"},
        # Two micro-batches of half the rows: copies are summed once for both.
        {"out": str(world / "hsdp-4"), "set": settings(world, 2, **copies, **parts, **{"train.batch_size": 1})},
        {"out": str(world / "cut-hsdp-4"), "resumes": str(at["cut"]), "strategy": "fsdp", "shard_size": 2},
        {"out": str(at["hsdp-cut"]), "set": settings(world, 1, **copies, **{"train.max_minutes": 1e-9})},
        {"out": str(world / "odd"), "set": settings(world, 1, **copies | {"train.shard_size": 3})},
        {"copies": {"size": 4, "shard_size": 2, "changed": -1}},
        {"copies": {"size": 4, "shard_size": 2, "changed": 3}},
    ]
    ends = in_processes(4, four, world)
    expected = [{0}] * 6 + [{75}, {ConfigError.exit_code}, {0}, {Diverged.exit_code}]
    assert [codes(case) for case in ends] == expected, ends
    assert "4 processes cannot be divided into groups of 3" in ends[7][0][1]
    assert all("the 2 copies of the student are not the same" in said for _code, said in ends[9])
    distill(load_config(overrides=settings(world, 4)), at["one"], device="cpu")
    shutil.copytree(at["cut"], at["from-cut"])
    resume(at["from-cut"], device="cpu", max_minutes=0.0)
    shutil.copytree(at["hsdp-cut"], at["from-hsdp"])
    resume(at["from-hsdp"], device="cpu", max_minutes=0.0)
    names = ["store/run", "ddp-2", "fsdp-2", "ddp-4", "fsdp-4", "from-cut", "cut-ddp-2", "ddp-cut-fsdp-2", "cut-fsdp-4"]
    names += ["ddp-cut-fsdp-4", "hsdp-4", "cut-hsdp-4"]
    for name in [*names, "from-hsdp", "fsdp-2-parts"]:
        compare(at["one"], world / name)
    compare(world / "inner", world / "inner-parts", steps=2)
    _check_what_is_said(world)
    _check_saves_in_the_background(world)
    _check_half_precision(world, at["half"])


def test_sharding_that_was_asked_for_and_did_not_happen_ends_the_run(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "fully_shard", lambda *_modules, **_options: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with refused(BrokenAtStart, "train.strategy", "model.embed_tokens.weight"):
            fsdp.Sharded(0, 1).place(AutoModelForCausalLM.from_pretrained(world / "student"), [])
    finally:
        dist.destroy_process_group()


def _check_what_is_said(world: Path) -> None:
    """Who trains, with what; what a takeover changes; and the same verdict of all processes."""
    start = next(event for event in read_events(world / "fsdp-4" / "events.jsonl") if event["event"] == "run_start")
    assert start["schedule"]["processes"] == 4 and start["schedule"]["strategy"] == "fsdp"
    start = next(event for event in read_events(world / "hsdp-4" / "events.jsonl") if event["event"] == "run_start")
    assert (start["schedule"]["strategy"], start["schedule"]["copies"]) == ("fsdp", 2)
    notes = [event["text"] for event in read_events(world / "cut-fsdp-4" / "events.jsonl") if event["event"] == "note"]
    assert any("begun with 2 processes, continued with 4" in text for text in notes)
    spoilt = [event for event in read_events(world / "spoilt" / "events.jsonl") if event["event"] == "guard"]
    assert [event["action"] for event in spoilt if event["action"] != "retry"] == ["skip", "rollback"]
    assert torch.isfinite(weights(world / "spoilt")).all()
    # A sharded teacher: each process holds a half, and everything that is said of it is said of the whole.
    runs = ("one", *IN_PARTS)
    whole, *summaries = (json.loads((world / run / "summary.json").read_bytes()) for run in runs)
    for summary in summaries:
        held = summary["teacher_shards"]
        assert held["held_bytes"] < 0.51 * held["whole_bytes"]
        assert summary["teacher"]["bits_per_byte"] == pytest.approx(whole["teacher"]["bits_per_byte"], rel=1e-6)
        assert summary["student"]["kl"] == pytest.approx(whole["student"]["kl"], rel=1e-4)
    rows = [json.loads((world / run / "tokens.json").read_bytes())["rows"] for run in runs]
    assert [len(one) for one in rows] == [len(rows[0])] * len(runs) and rows[0]
    # Each process wrote its own part of the sharded checkpoint, under one manifest.
    manifest = json.loads((sorted((world / "cut" / "checkpoints").glob("step-*"))[-1] / "manifest.json").read_bytes())
    assert manifest["format"] == 2 and len([name for name in manifest["files"] if name.startswith("shard-")]) == 2


def _check_saves_in_the_background(world: Path) -> None:
    """Parts written by threads are those that all processes waited for; a full disk in one costs that save alone."""
    stores = [CheckpointStore(world / name / "checkpoints") for name in ("fsdp-2", "awaited")]
    one, other = (store.load_newest(without=[STEPS]) for store in stores)
    assert one is not None and other is not None and one.step == other.step == 4
    for part in ("student", "optimizer", "random", "best"):
        assert set(one.tensors[part]) == set(other.tensors[part])
        assert all(torch.equal(tensor, other.tensors[part][name]) for name, tensor in one.tensors[part].items())
    events = list(read_events(world / "fsdp-2" / "events.jsonl"))
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [4, 6]
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert sum("cannot write the checkpoint of step 2: another process" in text for text in notes) == 1


def _check_half_precision(world: Path, out: Path) -> None:
    """FP16 weights: gradients of micro-batches and processes are summed in FP32."""
    distill(load_config(overrides=settings(world, 4, **{"precision.mode": "fp16-master"})), out, device="cpu")
    one, other = losses(out), losses(world / "half-2")
    assert max(abs(a / b - 1) for a, b in zip(other, one, strict=True)) < 1e-4
    assert float((weights(out) - weights(world / "half-2")).abs().max()) < 2e-3
