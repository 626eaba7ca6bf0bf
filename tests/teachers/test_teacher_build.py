"""Whole runs with a teacher that is quantised, or whose layers are streamed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cache_cases
import pytest
import tiny
import torch
from refusals import refused
from safetensors.torch import load_file

from stillroom.config import load_config
from stillroom.core.errors import BrokenAtStart, ConfigError, Interrupted
from stillroom.report import write_report
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume
from stillroom.training.loop import Stop
from stillroom.training.write_cache import make_cache

SHORT = {"train__max_steps": 4, "train__eval_steps": 2, "eval__samples": 0, "precision__mode": "fp32"}
INT8 = {"teacher__quantisation": "int8"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cache_cases.save_world(tmp_path_factory.mktemp("small"))


def config(world: Path, **over: Any) -> Any:
    return load_config(overrides=tiny.settings(world, **{**SHORT, **over}))


def run(world: Path, out: Path, **over: Any) -> Path:
    distill(config(world, **over), out, device="cpu")
    return out


def steps(folder: Path) -> list[tuple[float, float]]:
    events = read_events(folder / "events.jsonl")
    return [(event["train_loss"], event["grad_norm"]) for event in events if event["event"] == "step"]


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def assert_same_run(one: Path, other: Path) -> None:
    assert steps(one) == steps(other)
    mine, theirs = (load_file(folder / "student" / "model.safetensors") for folder in (one, other))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def quantised_run(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(small, tmp_path_factory.mktemp("runs") / "int8", **INT8)


def test_the_measured_kl_is_in_the_log_the_summary_and_the_report(small: Path, quantised_run: Path) -> None:
    [event] = [event for event in read_events(quantised_run / "events.jsonl") if event["event"] == "teacher_quantised"]
    found = summary(quantised_run)["teacher_quantisation"]
    assert found == {key: event[key] for key in found}
    assert found["kind"] == "int8" and 0.0 < found["kl"] < found["max_kl"] == 0.05
    assert found["positions"] >= 256 and found["bytes"] < found["full_bytes"]
    text = write_report(quantised_run).read_text()
    assert f"int8, KL to full {found['kl']:.2g}" in text


def test_the_student_learns_from_the_quantised_teacher(small: Path, quantised_run: Path, tmp_path: Path) -> None:
    full = run(small, tmp_path / "full")
    assert "teacher_quantisation" not in summary(full)
    ours, theirs = steps(quantised_run), steps(full)
    assert ours != theirs and ours[0][0] == pytest.approx(theirs[0][0], rel=1e-2)


def test_a_run_with_a_quantised_teacher_resumes_bit_for_bit(
    small: Path, quantised_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = tmp_path / "stopped"
    asked = []

    def is_wanted(_stop: Stop) -> bool:
        asked.append(1)
        return len(asked) > 2

    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", is_wanted)
        with pytest.raises(Interrupted):
            run(small, stopped, **INT8)
    assert 0 < len(steps(stopped)) < 4
    resume(stopped, device="cpu")
    assert_same_run(stopped, quantised_run)


def test_answers_of_a_quantised_teacher_are_cached_under_its_own_identity(small: Path, tmp_path: Path) -> None:
    kind = {"teacher__signal__kind": "hybrid"}
    told: list[str] = []
    info = make_cache(config(small, **INT8, **kind), tmp_path / "cache", device="cpu", tell=told.append)
    plain = make_cache(config(small, **kind), tmp_path / "plain", device="cpu")
    mine, theirs = info["teacher"], plain["teacher"]
    assert (mine["quantisation"], theirs["quantisation"]) == ("int8", "none")
    assert mine["weights"] == theirs["weights"] and 0.0 < mine["teacher_quantisation"]["kl"] < 0.05
    assert any("kl to the full teacher" in text for text in told)

    cached = run(small, tmp_path / "cached", teacher__cache=str(tmp_path / "cache"), **INT8)
    live = run(small, tmp_path / "live", **INT8, **kind)
    assert_same_run(cached, live)
    assert summary(cached)["teacher_quantisation"] == mine["teacher_quantisation"]
    assert summary(live)["teacher_quantisation"]["kind"] == "int8"
    with refused(ConfigError, "teacher.cache", "teacher.quantisation") as caught:
        run(small, tmp_path / "mixed", teacher__cache=str(tmp_path / "cache"))
    assert caught.value.exit_code == 2


def test_an_automatic_cache_is_written_by_the_quantised_teacher(small: Path, tmp_path: Path) -> None:
    over = {**INT8, "teacher__cache": "auto", "teacher__signal__compare": "whole"}
    found = summary(run(small, tmp_path / "auto", **over))
    assert found["teacher_quantisation"]["kind"] == "int8"


def test_an_automatic_cache_names_the_package_that_is_missing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with refused(BrokenAtStart, "teacher.quantisation", "torchao") as caught:
        run(small, tmp_path / "auto", **INT8, teacher__cache="auto")
    assert caught.value.exit_code == 20


def test_a_run_is_refused_above_the_bound(small: Path, tmp_path: Path) -> None:
    with refused(BrokenAtStart, "", "teacher.max_quantisation_kl = 1e-09") as caught:
        run(small, tmp_path / "refused", **INT8, teacher__max_quantisation_kl=1e-9)
    assert caught.value.exit_code == 20


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"teacher__placement": "offload"}, "teacher.placement"),
        ({"teacher__router__mode": "sar"}, "teacher.router.mode"),
    ],
)
def test_settings_that_need_the_full_teacher_are_refused(small: Path, over: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        config(small, **INT8, **over)
    assert caught.value.exit_code == 2


# -- streamed --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a teacher of four layers."""
    folder = tmp_path_factory.mktemp("deep")
    tiny.save_trained(folder / "teacher", width=32, num_layers=4, steps=20)
    tiny.save_model(folder / "student", "llama", width=16, num_layers=1, seed=2)
    tiny.save_text(folder / "train.jsonl", count=60)
    return folder


STREAM = {"teacher__placement": "stream"}


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_run_with_a_streamed_teacher_is_the_ordinary_run_to_the_last_bit(
    deep: Path, tmp_path: Path, kind: str
) -> None:
    over = {"teacher__signal__kind": kind, "eval__samples": 1}
    streamed = run(deep, tmp_path / "streamed", **STREAM, **over)
    assert_same_run(streamed, run(deep, tmp_path / "plain", **over))
    found = summary(streamed)["teacher_streaming"]
    assert (found["layers"], found["peak_layers"], found["stored"]) == (4, 2, "in its files")
    notes = [event["text"] for event in read_events(streamed / "events.jsonl") if event["event"] == "note"]
    assert any("at most two" in text for text in notes) and any("writes no samples" in text for text in notes)
    [sample] = [event for event in read_events(streamed / "events.jsonl") if event["event"] == "sample"]
    assert "teacher" not in sample and sample["student"]


def test_a_cache_written_by_a_streamed_teacher_has_the_same_bytes(deep: Path, tmp_path: Path) -> None:
    for name, over in (("streamed", STREAM), ("plain", {})):
        make_cache(config(deep, **over), tmp_path / name, device="cpu")
    ours, theirs = (cache_cases.contents(tmp_path / name) for name in ("streamed", "plain"))
    assert ours == theirs
    run(deep, tmp_path / "auto", teacher__cache="auto", teacher__signal__compare="whole", **STREAM)


def test_a_run_with_a_streamed_teacher_resumes_bit_for_bit(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped, asked = run(deep, tmp_path / "whole", **STREAM), tmp_path / "stopped", []

    def is_wanted(_stop: Stop) -> bool:
        asked.append(1)
        return len(asked) > 2

    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", is_wanted)
        with pytest.raises(Interrupted):
            run(deep, stopped, **STREAM)
    resume(stopped, device="cpu")
    assert_same_run(stopped, whole)


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"student__init": "shrink", "student__shrink__layers": 1}, "cuts the student from the whole teacher"),
        ({"teacher__router__mode": "sar"}, r"teacher\.router\.mode"),
        ({"teacher__quantisation": "int8"}, "a quantised teacher stays on the device"),
    ],
)
def test_settings_that_need_all_layers_at_once_are_refused(deep: Path, over: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        config(deep, **STREAM, **over)
    assert caught.value.exit_code == 2
