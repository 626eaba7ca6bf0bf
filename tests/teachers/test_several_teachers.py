"""Laws of several teachers: each source of the training data is answered by its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from refusals import refused

from stillroom.config import load_config
from stillroom.core.errors import ConfigError, InputsChanged
from stillroom.core.types import DenseSignal, Needs
from stillroom.teachers.cache.manifest import NAME
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume
from stillroom.training.run import RunState
from stillroom.training.step import attempt
from stillroom.training.write_cache import make_cache

CONCURRENT = {"teacher__concurrent": True}
MANY = {"train__gradient_accumulation_steps": 3, "objectives__kd__weight": 0.6, "objectives__ce__weight": 0.4}


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    return [str(tiny.save_text(tmp_path / f"{name}.jsonl", 30, seed)) for name, seed in (("a", 5), ("b", 6))]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A second teacher, with other answers."""
    return str(tiny.save_trained(tmp_path_factory.mktemp("other") / "teacher", width=32, num_layers=1, steps=40))


def sources(texts: list[str], *teachers: str | None) -> list[dict[str, Any]]:
    return [{"path": path, "teacher": teacher} for path, teacher in zip(texts, teachers, strict=True)]


def losses(folder: Path) -> list[float]:
    return [event["train_loss"] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def run_of(world: Path, folder: Path, texts: list[dict[str, Any]], **over: Any) -> Any:
    config = load_config(overrides=tiny.settings(world, data__train=texts, **MANY, **{"train__max_steps": 4, **over}))
    return distill(config, folder, device="cpu")


def test_the_same_teacher_for_each_source_is_one_teacher(world: Path, tmp_path: Path, texts: list[str]) -> None:
    same = str(world / "teacher")
    one = run_of(world, tmp_path / "one", sources(texts, None, None))
    two = run_of(world, tmp_path / "two", sources(texts, None, same), **CONCURRENT)
    assert losses(two.folder) == pytest.approx(losses(one.folder), abs=1e-6)
    assert two.summary["student"]["perplexity"] == pytest.approx(one.summary["student"]["perplexity"], rel=1e-6)


def test_each_source_is_answered_by_its_own_teacher(make_run: Any, texts: list[str], other: str) -> None:
    run = make_run(data__train=sources(texts, None, other), **CONCURRENT, **MANY)
    alone = make_run(data__train=sources(texts, None, None), teacher__model=other, **MANY)
    seen = set()
    for batch in run.loader.window(0) + run.loader.window(1):
        (source,) = set(batch.sources)
        seen.add(source)
        signal = run.source_teacher(batch).observe(batch, Needs())
        asked = alone.teacher if source == texts[1] else run.teacher.main
        expected = asked.observe(batch, Needs())
        assert isinstance(signal, DenseSignal) and torch.equal(signal.hidden, expected.hidden)
    assert seen == set(texts)
    held_out = run.eval_batches()[0]
    assert torch.equal(
        run.teacher.observe(held_out, Needs()).hidden, run.teacher.main.observe(held_out, Needs()).hidden
    )
    evidence, _ = attempt(run, RunState(), run.loader.window(0))
    assert set(evidence.sources) <= set(texts) and evidence.bad_teacher_rows == 0


def test_a_source_learns_from_the_cache_of_its_teacher(
    make_run: Any, world: Path, tmp_path: Path, texts: list[str], other: str
) -> None:
    """The live main teacher and a stored one: `stillroom cache --source` asks about the rows of that source alone."""
    few = {"teacher__signal__k": 320, "teacher__signal__kind": "top_k", **MANY}
    live = sources(texts, None, other)
    config = load_config(overrides=tiny.settings(world, data__train=live, **few))
    told = make_cache(config, tmp_path / "cache", device="cpu", source=texts[1])
    everyone = make_cache(config, tmp_path / "main", device="cpu")
    assert told["teacher"]["teacher"] == other and everyone["teacher"]["teacher"] != other
    stored = sources(texts, None, str(tmp_path / "cache"))
    runs = [
        make_run(data__train=live, **CONCURRENT, **few),
        make_run(data__train=stored, **few),
        make_run(data__train=stored, teacher__cache=str(tmp_path / "main"), **MANY),
    ]
    assert [len(run.corpus.train.parts[1].rows) for run in runs] == [told["rows"]] * 3
    for index in range(2):
        found = [attempt(run, RunState(), run.loader.window(index))[0].loss for run in runs]
        assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-3), "to a step of what is stored"
    # Resumed, it is the same run; with other answers it is refused.
    config = load_config(overrides=tiny.settings(world, data__train=stored, **few, train__save_steps=2))
    whole = distill(config, tmp_path / "whole", device="cpu")
    assert tiny.in_child(lambda: distill(config, tmp_path / "parts", device="cpu", inject="kill@7")) == -9
    manifest = tmp_path / "cache" / NAME
    kept = manifest.read_bytes()
    manifest.write_text(json.dumps({**json.loads(kept), "teacher": {"changed": "yes"}}))
    with refused(InputsChanged, "cache"):
        resume(tmp_path / "parts", device="cpu")
    manifest.write_bytes(kept)
    assert losses(resume(tmp_path / "parts", device="cpu").folder) == losses(whole.folder)


def test_a_second_live_teacher_is_asked_for_by_name(make_run: Any, world: Path, texts: list[str], other: str) -> None:
    live = sources(texts, None, other)
    with refused(ConfigError, "data.train", f"stillroom cache CONFIG --source {texts[1]}", "teacher.concurrent=true"):
        make_run(data__train=live)
    # The student's own base is no second model.
    run = make_run(data__train=live, teacher__model="self", student__adapter__rank=2)
    assert run.teacher.main.as_model().model is run.student.model
    assert run.teacher.training is run.teacher.main.training or not run.teacher.training.tensors()


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"objectives__feature__weight": 0.5}, "feature"),
        ({"objectives__kd__weight": 0.0, "objectives__ce__weight": 1.0}, "objectives.kd.weight"),
        ({"teacher__placement": "shard"}, "teacher.placement"),
        ({"student__init": "shrink", "student__shrink__layers": 1}, "student.init"),
    ],
)
def test_what_does_not_go_with_several_teachers_is_refused(
    world: Path, texts: list[str], over: dict[str, Any], named: str
) -> None:
    with refused(ConfigError, "", named):
        load_config(overrides=tiny.settings(world, data__train=sources(texts, None, "m"), **over))
    labels = [{"path": texts[0], "teacher": "m", "objectives": "labels"}]
    with refused(ConfigError, "", "labels"):
        load_config(overrides=tiny.settings(world, data__train=labels))


def test_only_a_source_with_its_own_model_has_a_cache_to_write(world: Path, tmp_path: Path, texts: list[str]) -> None:
    config = load_config(overrides=tiny.settings(world, data__train=sources(texts, None, None)))
    with refused(ConfigError, "--source", "none"):
        make_cache(config, tmp_path / "cache", device="cpu", source=texts[0])


def test_contexts_and_averages_go_with_several_teachers(
    world: Path, tmp_path: Path, texts: list[str], other: str
) -> None:
    over = {"teacher__model": "ema", "teacher__ema_decay": 0.5, "data__teacher_prefix": "the room: ", **CONCURRENT}
    result = run_of(world, tmp_path / "run", sources(texts, None, other), train__save_steps=2, **over)
    saved = sorted((result.folder / "checkpoints").glob("step-*"))[-1]
    assert (saved / "router.safetensors").exists() and len(losses(result.folder)) == 4
