"""Whole runs on a mixture from the token store: packed rows, two sources with weights, one learned from its labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

from stillroom.config import load_config
from stillroom.data import store as store_module
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume


def save_records(path: Path, count: int, seed: int) -> str:
    texts = tiny.sentences(count, seed)
    values = [{"prompt": text[:20], "completion": text[20:]} for text in texts]
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


@pytest.fixture
def mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of a run; each file is tokenized in several batches."""
    monkeypatch.setattr(store_module, "BATCH_RECORDS", 17)
    return {
        "data__train": [
            {"path": save_records(tmp_path / "taught.jsonl", 70, 5)},
            {"path": save_records(tmp_path / "labels.jsonl", 45, 6), "objectives": "labels", "weight": 1.5},
        ],
        "data__cache": str(tmp_path / "cache"),
        "data__packing": "packed",
        "data__max_length": 64,
        "objectives__kd__weight": 0.7,
        "objectives__ce__weight": 0.3,
        "eval__samples": 0,
    }


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def test_a_killed_run_on_a_stored_packed_mixture_resumes_bit_for_bit_and_tokenizes_nothing(
    world: Path, tmp_path: Path, mixture: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    over = {**mixture, "train__gradient_accumulation_steps": 2, "train__save_steps": 2, "data__order": "short_first"}
    config = load_config(overrides=tiny.settings(world, **over))
    assert tiny.in_child(lambda: distill(config, tmp_path / "cut", device="cpu", inject="kill@6")) == -9
    assert len([*(tmp_path / "cache").glob("*/*/manifest.json")]) == 2
    monkeypatch.setattr(store_module.TokenStore, "_tokenized", lambda *_: pytest.fail("it tokenizes"))
    whole = distill(config, tmp_path / "whole", device="cpu")
    again = resume(tmp_path / "cut", device="cpu")
    assert again.summary["student"]["perplexity"] == whole.summary["student"]["perplexity"]
    one, other = (load_file(tmp_path / name / "student" / "model.safetensors") for name in ("whole", "cut"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    found, expected = steps_of(tmp_path / "cut"), steps_of(tmp_path / "whole")
    assert [step["step"] for step in found] == [*range(1, 9)]
    for key in ("train_loss", "grad_norm", "sources"):
        assert [step[key] for step in found] == [step[key] for step in expected]
    taught, labels = (source["path"] for source in mixture["data__train"])
    seen = {name for step in found for name in step["sources"]}
    assert seen == {taught, labels}
    assert all(("kd" in terms) == (name == taught) for step in found for name, terms in step["sources"].items())
    told = {row["name"]: row for row in again.summary["sources"]}
    assert told[labels]["epochs"] == pytest.approx(1.5 * told[taught]["epochs"], rel=0.2)  # rounded to whole rows


@pytest.mark.parametrize("place", [0, 1])
def test_held_out_terms_are_those_of_training_on_the_same_documents(
    world: Path, tmp_path: Path, mixture: dict[str, Any], place: int
) -> None:
    """Training rows are packed, held-out records stand alone: the terms of a source are the same."""
    source = mixture["data__train"][place]["path"]
    over = {
        **mixture,
        "data__eval": source,
        "train__batch_size": 4,
        "train__gradient_accumulation_steps": 99,  # a step is an epoch
        "train__max_steps": 1,
        "train__eval_steps": 1,
        "train__learning_rate": 1e-12,
        "eval__max_batches": 0,
    }
    over["data__train"] = [{**one, "weight": 2.0} for one in mixture["data__train"]]
    distill(load_config(overrides=tiny.settings(world, **over)), tmp_path / "run", device="cpu")
    (step,) = steps_of(tmp_path / "run")
    (held,) = (e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "eval" and e["step"] == 1)
    trained = dict(step["sources"][source])
    assert trained.pop("targets") == 2 * held["tokens"]
    assert set(trained) == ({"ce"} if place else {"kd", "ce"})
    for name, mean in trained.items():
        assert held["terms"][name]["raw"] == pytest.approx(mean, rel=1e-5)
