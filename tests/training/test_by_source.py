"""Several sources in a run: what each learns from, what one target weighs, and what is told of each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny

from stillroom.config import load_config
from stillroom.core.errors import Interrupted
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume
from stillroom.training.run import RunState
from stillroom.training.step import attempt

WEIGHTS = {"objectives__kd__weight": 0.7, "objectives__ce__weight": 0.2, "objectives__kd__temperature": 2.0}


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    taught, labels = tmp_path / "taught.jsonl", tmp_path / "labels.jsonl"
    tiny.save_text(taught, 120, seed=5)
    tiny.save_text(labels, 90, seed=6)
    return [{"path": str(taught)}, {"path": str(labels), "objectives": "labels", "weight": 2}]


def windows(run: Any, name: str) -> list[Any]:
    """The first micro-batches of one source."""
    batches = [batch for index in range(run.loader.num_windows) for batch in run.loader.window(index)]
    return [batch for batch in batches if batch.sources[0] == name][:2]


@pytest.mark.parametrize("inner", [{}, {"objectives__feature__weight": 0.1}])
def test_a_target_weighs_the_same_whatever_its_source_is_learned_from(
    make_run: Any, sources: list[dict[str, Any]], inner: dict[str, float]
) -> None:
    run = make_run(data__train=sources, **WEIGHTS, **inner)
    taught, labels = (windows(run, source["path"]) for source in sources)
    alone_taught, _ = attempt(run, RunState(), taught)
    alone_labels, _ = attempt(run, RunState(), labels)
    both, _ = attempt(run, RunState(), [taught[0], labels[0], taught[1], labels[1]])
    assert alone_labels.loss == pytest.approx(0.9 * alone_labels.terms["ce"], rel=1e-5)
    sizes = alone_taught.num_targets, alone_labels.num_targets
    if not inner:  # a feature term counts rows, the others targets
        mean = (sizes[0] * alone_taught.loss + sizes[1] * alone_labels.loss) / sum(sizes)
        assert both.loss == pytest.approx(mean, rel=1e-5)
    for alone, source, size in zip((alone_taught, alone_labels), sources, sizes, strict=True):
        told = dict(both.sources[source["path"]])
        assert told.pop("targets") == size
        expected = {name: mean for name, mean in alone.terms.items() if alone is alone_taught or name == "ce"}
        assert told == pytest.approx(expected, rel=1e-5)


def test_the_teacher_is_not_asked_about_labels_alone(
    make_run: Any, sources: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(data__train=sources, train__gradient_accumulation_steps=4, **WEIGHTS)
    asked: list[str] = []
    original = type(run.teacher).observe

    def observe(self: Any, batch: Any, needs: Any) -> Any:
        asked.extend(batch.sources)
        return original(self, batch, needs)

    monkeypatch.setattr(type(run.teacher), "observe", observe)
    for index in range(run.loader.num_windows):
        attempt(run, RunState(), run.loader.window(index))
    assert set(asked) == {sources[0]["path"]} and len(asked) == len(run.corpus.train.parts[0].rows)


def test_a_step_with_several_sources_reads_from_the_device_once(
    make_run: Any, sources: list[dict[str, Any]], count_reads: Any
) -> None:
    run = make_run(data__train=sources, train__gradient_accumulation_steps=4)
    window = run.loader.window(0)
    attempt(run, RunState(), window)
    reads = count_reads()
    attempt(run, RunState(), window)
    assert reads == ["tolist"]


def test_labels_alone_are_learned_where_cross_entropy_has_no_weight(
    make_run: Any, sources: list[dict[str, Any]]
) -> None:
    run = make_run(data__train=sources, objectives__kd__weight=1.0, objectives__ce__weight=0.0)
    evidence, _ = attempt(run, RunState(), windows(run, sources[1]["path"]))
    assert evidence.loss > 1.0 and evidence.grad_norm > 0
    assert evidence.terms["kd"] == 0.0
    both, _ = attempt(run, RunState(), [windows(run, source["path"])[0] for source in sources])
    assert [set(both.sources[source["path"]]) for source in sources] == [{"targets", "kd"}, {"targets", "ce"}]


def test_a_run_tells_of_each_source_and_resumes_after_a_move(
    world: Path, tmp_path: Path, sources: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for source in sources:
        shutil.move(source["path"], tree)
        source["path"] = str(tree / Path(source["path"]).name)
    over = {
        "data__train": sources,
        "train__max_steps": 6,
        "train__save_steps": 3,
        "train__gradient_accumulation_steps": 2,
    }
    config = load_config(overrides=tiny.settings(world, **over, **WEIGHTS))
    whole = distill(config, tree / "whole", device="cpu")
    told = {row["name"]: row for row in whole.summary["sources"]}
    assert [told[source["path"]]["objectives"] for source in sources] == ["all", "labels"]
    ratio = told[sources[1]["path"]]["epochs"] / told[sources[0]["path"]]["epochs"]
    assert ratio == pytest.approx(2, rel=0.01)
    steps = [event for event in read_events(tree / "whole" / "events.jsonl") if event["event"] == "step"]
    assert all(set(terms) <= {"targets", "kd", "ce"} for step in steps for terms in step["sources"].values())
    assert any("kd" in step["sources"].get(sources[0]["path"], {}) for step in steps)
    assert all("kd" not in step["sources"].get(sources[1]["path"], {}) for step in steps)
    assert sum(terms["targets"] for step in steps for terms in step["sources"].values()) == whole.summary["tokens"]

    stops = iter([False] * 3 + [True] * 99)
    monkeypatch.setattr("stillroom.training.loop.Stop.is_wanted", lambda self: next(stops))
    with pytest.raises(Interrupted):
        distill(config, tree / "cut", device="cpu")
    monkeypatch.undo()
    moved = tmp_path / "moved"
    shutil.move(tree, moved)
    again = resume(moved / "cut", device="cpu")
    assert again.summary["student"]["perplexity"] == whole.summary["student"]["perplexity"]
    kept = json.loads((moved / "cut" / "config.json").read_text())
    assert kept["paths"]["data.train.1"]["relative"].endswith("labels.jsonl")
