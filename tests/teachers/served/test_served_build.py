"""Whole caches and runs with a teacher on a server, beside those with the same teacher here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import cache_cases
import pytest
import tiny
import torch
from refusals import refused
from safetensors.torch import load_file
from served_model import NAME, ServedModel, serving

from stillroom.config import load_config
from stillroom.core.errors import ConfigError, ServerGone, ServerUnusable
from stillroom.models import load as loading
from stillroom.teachers.cache import build as cache_build
from stillroom.teachers.cache.reader import Cache
from stillroom.teachers.signals import LOG_STEP
from stillroom.telemetry import read_events
from stillroom.training.distill import distill
from stillroom.training.write_cache import make_cache

SHORT = {
    "train__max_steps": 6,
    "train__eval_steps": 3,
    "eval__samples": 0,
    "precision__mode": "fp32",
    "teacher__signal__kind": "top_k",
    "teacher__signal__k": 12,
}
FAST = {"teacher__requests__pause_seconds": 0.01, "teacher__requests__retries": 3}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cache_cases.save_world(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def without_weights(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same world, of whose teacher the tokenizer and the configuration alone are here."""
    folder = Path(shutil.copytree(small, tmp_path_factory.mktemp("thin") / "world"))
    for file in (folder / "teacher").glob("*.safetensors"):
        file.unlink()
    return folder


def config(world: Path, **over: Any) -> Any:
    return load_config(overrides=tiny.settings(world, **{**SHORT, **over}))


def served_config(world: Path, served: ServedModel, **over: Any) -> Any:
    return config(world, **{"teacher__server": f"{served.url}/v1", **FAST, **over})


def answers(folder: Path) -> dict[str, Any]:
    cache = Cache(folder)
    keys = [shard.keys[row].tobytes().hex() for shard in cache.shards for row in range(shard.num_rows)]
    return {key: cache.answer(key) for key in keys}


def notes(folder: Path) -> str:
    events = read_events(folder / "events.jsonl")
    return "\n".join(event["text"] for event in events if event["event"] == "note")


def losses(folder: Path) -> list[float]:
    return [event["train_loss"] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def test_a_cache_from_a_server_is_the_cache_of_the_same_teacher_here(
    small: Path, without_weights: Path, tmp_path: Path
) -> None:
    make_cache(config(small), tmp_path / "here", device="cpu")
    with serving(small / "teacher") as served:
        found = make_cache(served_config(without_weights, served), tmp_path / "there", device="cpu")
    ours, theirs = answers(tmp_path / "there"), answers(tmp_path / "here")
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for key, answer in ours.items():
        gaps = abs(answer.log_probs.astype(int) - theirs[key].log_probs.astype(int))
        assert gaps.max() <= 1
        masses = [torch.exp(-LOG_STEP * torch.tensor(one.tail.astype(float))) for one in (answer, theirs[key])]
        assert torch.allclose(*masses, rtol=1.5 * LOG_STEP, atol=2e-6)
        assert (answer.ids == theirs[key].ids).mean() > 0.98
    assert found["teacher"]["served_model"] == NAME and found["teacher"]["server"] == served.url
    assert found["teacher"]["server_version"] == "0.0-tiny"


def test_a_run_trains_with_a_teacher_on_a_server(
    small: Path, without_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distill(config(small), tmp_path / "here", device="cpu")
    monkeypatch.setattr(loading, "load_teacher", lambda *_: pytest.fail("the teacher was loaded"))
    with serving(small / "teacher") as served:
        distill(served_config(without_weights, served), tmp_path / "there", device="cpu")
    assert losses(tmp_path / "there") == pytest.approx(losses(tmp_path / "here"), rel=2e-3)
    mine, theirs = (load_file(tmp_path / name / "student" / "model.safetensors") for name in ("there", "here"))
    assert all(torch.allclose(mine[name], theirs[name], atol=5e-3) for name in mine)
    summary = json.loads((tmp_path / "there" / "summary.json").read_bytes())
    assert summary["teacher_server"]["served_model"] == NAME and summary["teacher_server"]["requests"] > 6
    assert summary["teacher"]["perplexity"] > 1
    told = notes(tmp_path / "there")
    assert "is not loaded" in told and "fit the text best" in told and "KL is a lower bound" in told


def test_rollouts_are_answered_by_a_server_as_by_the_same_teacher_here(
    small: Path, without_weights: Path, tmp_path: Path
) -> None:
    """Rows of rounds are sent when they are written, not ahead; a run that a dead server ended is continued."""
    own = {"rollouts__share": 0.5, "rollouts__every": 2, "rollouts__max_new_tokens": 6, "rollouts__prompt_tokens": 4}
    own |= {"train__gradient_accumulation_steps": 2, "train__batch_size": 2, "train__save_steps": 2}
    distill(config(small, **own), tmp_path / "here", device="cpu")
    with serving(small / "teacher") as served:
        there = served_config(without_weights, served, **own)

        def die(event: Any) -> None:
            if event["event"] == "rollouts" and event["round"] == 1:
                served.faults = ["500"] * 1000

        with pytest.raises(ServerGone) as caught:
            distill(there, tmp_path / "there", device="cpu", listeners=(die,))
        assert caught.value.exit_code == 75
        served.faults = []
        distill(there, tmp_path / "there", device="cpu")
    assert losses(tmp_path / "there") == pytest.approx(losses(tmp_path / "here"), rel=2e-3)
    steps = [event for event in read_events(tmp_path / "there" / "events.jsonl") if event["event"] == "step"]
    assert all(set(step["sources"]["rollouts"]) == {"targets", "kd"} for step in steps)
    first = (tmp_path / name / "rollouts" / "round-000000" / "piece-000000.safetensors" for name in ("here", "there"))
    assert len({path.read_bytes() for path in first}) == 1, "the same student wrote it"


def test_an_automatic_cache_is_written_from_the_server_and_then_read_without_it(
    without_weights: Path, small: Path, tmp_path: Path
) -> None:
    with serving(small / "teacher") as served:
        over = {"teacher__cache": "auto"}
        distill(served_config(without_weights, served, **over), tmp_path / "one", device="cpu")
        asked = served.num_asked
        distill(served_config(without_weights, served, **over), tmp_path / "two", device="cpu")
        assert served.num_asked == asked
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert f"the answers are those of {NAME}" in notes(tmp_path / "two")


def test_a_cache_goes_on_after_the_server_went_away(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_build, "SERVED_SHARD_TOKENS", 300)
    with serving(small / "teacher") as served:
        make_cache(served_config(small, served), tmp_path / "sound", device="cpu")
        num_asked = served.num_asked

        def die(progress: Any) -> None:
            if progress.num_bytes:
                served.faults = ["500"] * 1000

        with pytest.raises(ServerGone) as caught:
            make_cache(served_config(small, served), tmp_path / "broken", device="cpu", on_progress=die)
        assert caught.value.exit_code == 75
        served.faults, served.num_asked = [], 0
        kept = Cache(tmp_path / "broken").num_rows
        make_cache(served_config(small, served), tmp_path / "broken", device="cpu")
        assert kept > 0 and served.num_asked < num_asked
    sound, resumed = answers(tmp_path / "sound"), answers(tmp_path / "broken")
    assert sound.keys() == resumed.keys()
    assert all((sound[key].log_probs == resumed[key].log_probs).all() for key in sound)


def test_a_cache_is_not_continued_by_another_model(small: Path, tmp_path: Path) -> None:
    with serving(small / "teacher") as served:
        make_cache(served_config(small, served, data__train_share=0.5), tmp_path / "cache", device="cpu")
        before = answers(tmp_path / "cache").keys()
        served.other_after = 0
        over = {"teacher__requests__check_temperature": False}
        with refused(ServerUnusable, "", "probe"):
            make_cache(served_config(small, served, **over), tmp_path / "cache", device="cpu")
        assert answers(tmp_path / "cache").keys() == before


def test_the_key_is_in_no_file_of_the_run(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINY_KEY", "sk-very-secret-word")
    with serving(small / "teacher") as served:
        served.key = "sk-very-secret-word"
        over = {"teacher__requests__api_key_variable": "TINY_KEY"}
        distill(served_config(small, served, **over), tmp_path / "run", device="cpu")
    held = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"TINY_KEY" in held and b"very-secret" not in held
    captured = capsys.readouterr()
    assert "very-secret" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("over", "told"),
    [
        ({"objectives__kd__temperature": 2.0}, "cannot be derived"),
        ({"teacher__signal__kind": "hybrid", "teacher__signal__k": None}, "needs the whole distribution"),
        ({"teacher__placement": "offload"}, "teacher.placement is for weights on this machine"),
        ({"teacher__quantisation": "int8"}, "teacher.quantisation is for weights"),
        ({"objectives__feature__weight": 1.0}, "look inside the teacher"),
        ({"student__init": "shrink"}, "student.init = 'shrink' cuts it"),
    ],
)
def test_what_a_server_cannot_give_is_refused_before_it_is_asked(
    small: Path, tmp_path: Path, over: dict[str, Any], told: str
) -> None:
    asked = {"teacher__server": "http://127.0.0.1:9", **over}
    with pytest.raises(ConfigError, match=told) as caught:
        distill(config(small, **asked), tmp_path / "run", device="cpu")
    assert caught.value.exit_code == 2


def test_rows_that_are_longer_than_the_server_takes_are_refused(small: Path, tmp_path: Path) -> None:
    with serving(small / "teacher") as served:
        served.max_model_len = 20
        with refused(ConfigError, "data.max_length", "20") as caught:
            make_cache(served_config(small, served), tmp_path / "cache", device="cpu")
    assert "data.max_length=18" in str(caught.value)
