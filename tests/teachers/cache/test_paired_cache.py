"""Runs of two tokenizers from a teacher cache beside the same runs from the live teacher."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import cache_cases
import pair_tokenizers
import pytest
import tiny
import torch
from refusals import refused
from safetensors.torch import load_file

from stillroom.config import load_config
from stillroom.core.errors import ConfigError, StillroomError
from stillroom.models import load as loading
from stillroom.teachers.cache.reader import Cache
from stillroom.telemetry import read_events
from stillroom.training.distill import distill
from stillroom.training.write_cache import import_cache, make_cache


def save(folder: Path, family: str, tokenizer: Any, **size: Any) -> None:
    tiny.save_model(folder, family, vocab_size=len(tokenizer), with_tokenizer=False, **size)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save(folder / "teacher", "llama", pair_tokenizers.built("BPE with bytes"), width=32, num_layers=1, seed=3)
    save(folder / "student", "llama", pair_tokenizers.built("byte-level"), width=16, num_layers=1, seed=4)
    tiny.save_text(folder / "train.jsonl", 40)
    return folder


SHORT = {
    "train__max_steps": 4,
    "train__eval_steps": 2,
    "train__batch_size": 3,
    "train__gradient_accumulation_steps": 2,
    "eval__samples": 0,
    "precision__mode": "fp32",
}
EXACT = {"objectives__exact_match__weight": 0.3}
PREFIX = {"objectives__prefix_match__weight": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "target": {"teacher__signal__kind": "target"},
    "hybrid": {**EXACT, "teacher__signal__kind": "hybrid", "teacher__signal__m": 4, "teacher__signal__draws": 6},
    "sampled": {**EXACT, "teacher__signal__kind": "sampled", "teacher__signal__draws": 9},
    "top_k": {**EXACT, "teacher__signal__kind": "top_k", "teacher__signal__k": 7},
    "hybrid, groups": {**PREFIX, "teacher__signal__kind": "hybrid", "teacher__signal__m": 4},
    "top_k, groups": {**PREFIX, "teacher__signal__kind": "top_k", "teacher__signal__k": 7},
    "top_k, packed": {**EXACT, "teacher__signal__kind": "top_k", "data__packing": "packed"},
}


def config(pair: Path, **over: Any) -> Any:
    off = {f"objectives__{name}__weight": 0.0 for name in ("prefix_match", "exact_match")}
    return load_config(preset="cross-tokenizer", overrides=tiny.settings(pair, **{**SHORT, **off, **over}))


def cache(pair: Path, out: Path, **over: Any) -> Path:
    make_cache(config(pair, **over), out, device="cpu")
    return out


def run(pair: Path, out: Path, *, inject: str = "", **over: Any) -> Path:
    distill(config(pair, **over), out, device="cpu", inject=inject)
    return out


def events(folder: Path, name: str) -> list[Any]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == name]


def notes(folder: Path) -> str:
    return "\n".join(event["text"] for event in events(folder, "note"))


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
    return found


def assert_same_run(one: Path, other: Path) -> None:
    told = [[(e["train_loss"], e["grad_norm"], e["terms"]) for e in events(folder, "step")] for folder in (one, other)]
    assert told[0] == told[1] and len(told[0]) == 4
    mine, theirs = (load_file(folder / "student" / "model.safetensors") for folder in (one, other))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def refusal(pair: Path, out: Path, *, code: int = 2, **over: Any) -> str:
    """What a run that is refused with this exit code and some advice says."""
    with pytest.raises(StillroomError) as caught:
        run(pair, out, **over)
    assert caught.value.exit_code == code and caught.value.advice, caught.value
    return str(caught.value)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_from_the_cache_is_the_live_run_with_the_same_signal_bit_for_bit(
    pair: Path, tmp_path: Path, kind: str
) -> None:
    live = run(pair, tmp_path / "live", **KINDS[kind])
    place = cache(pair, tmp_path / "cache", **KINDS[kind], train__batch_size=8)
    stored = run(pair, tmp_path / "stored", teacher__cache=str(place), **KINDS[kind])
    assert_same_run(live, stored)
    assert "is not loaded" in notes(stored) and "answers live" in notes(live)
    found = summary(stored)
    assert found["teacher_signal"]["unknown_positions"] == 0 and found["two_tokenizers"]["share"] == 1.0
    assert found["teacher"]["source"] == "stored answers" and found["teacher"]["perplexity"] is None
    assert found["teacher"]["bits_per_byte"] == pytest.approx(summary(live)["teacher"]["bits_per_byte"], rel=1e-5)
    assert found["student"]["kl_per_byte"] == pytest.approx(summary(live)["student"]["kl_per_byte"], rel=1e-4)


def test_likelihoods_from_a_cache_are_those_of_the_whole_teacher(pair: Path, tmp_path: Path) -> None:
    """The stored probability of a target is FP32, so alm from a cache is alm from the live teacher to rounding."""
    place = cache(pair, tmp_path / "cache")
    stored, dense = run(pair, tmp_path / "stored", teacher__cache=str(place)), run(pair, tmp_path / "dense")
    assert Cache(place).manifest.signal.kind == "target"
    for mine, whole in zip(events(stored, "step"), events(dense, "step"), strict=True):
        assert mine["terms"]["alm"]["raw"] == pytest.approx(whole["terms"]["alm"]["raw"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)


def test_a_target_cache_takes_about_a_float_for_each_token_of_the_teacher(pair: Path, tmp_path: Path) -> None:
    held = Cache(cache(pair, tmp_path / "cache"))
    blocks = sum(int(shard.header["blocks_bytes"]) for shard in held.shards)
    assert blocks < 5.0 * held.num_positions + 30 * held.num_rows


def test_automatic_writes_once_and_reads_ever_after(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = load_config(preset="cross-tokenizer").objectives.weights
    assert preset["prefix_match"] and preset["alm"], "the preset can be cached as it is"
    over = {f"objectives__{name}__weight": preset[name] for name in ("prefix_match", "alm")}
    first = run(pair, tmp_path / "first", teacher__cache="auto", **over)
    (place,) = tmp_path.glob("teacher-cache-*")
    assert Cache(place).manifest.signal.kind == "hybrid" and Cache(place).manifest.signal.shared
    monkeypatch.setattr(loading, "load_teacher", lambda *_: pytest.fail("the teacher was loaded again"))
    assert_same_run(first, run(pair, tmp_path / "second", teacher__cache="auto", **over))


def test_a_cache_of_more_serves_a_run_that_needs_less(pair: Path, tmp_path: Path) -> None:
    place = cache(pair, tmp_path / "cache", **EXACT)
    stored = run(pair, tmp_path / "stored", teacher__cache=str(place))
    assert_same_run(stored, run(pair, tmp_path / "live", teacher__signal__kind="target"))


def test_a_cache_of_groups_is_not_one_of_shared_tokens(pair: Path, tmp_path: Path) -> None:
    place = str(cache(pair, tmp_path / "cache", **PREFIX))
    assert "teacher.signal.shared_tokens is" in refusal(pair, tmp_path / "a", teacher__cache=place, **EXACT)
    assert "ask for different answers" in refusal(pair, tmp_path / "b", teacher__cache="auto", **EXACT, **PREFIX)
    stored = run(pair, tmp_path / "c", teacher__cache=place)
    assert_same_run(stored, run(pair, tmp_path / "d", teacher__signal__kind="target"))


@pytest.mark.parametrize("spec", ["teacher_nan@2", "teacher_garbage@2"])
def test_faults_strike_stored_answers_and_the_run_goes_on(pair: Path, tmp_path: Path, spec: str) -> None:
    place = cache(pair, tmp_path / "cache", **EXACT)
    run(pair, tmp_path / "run", inject=spec, teacher__cache=str(place), **EXACT)
    second = events(tmp_path / "run", "step")[1]
    if spec.startswith("teacher_nan"):
        assert second["bad_teacher_rows"] > 0 and second["terms"]["alm"]["raw"] > 0, (
            "one of two micro-batches is struck"
        )
    assert f"injected {spec.partition('@')[0]}" in notes(tmp_path / "run")


# -- refusals --------------------------------------------------------------------------------------------


def test_a_damaged_row_is_named(pair: Path, tmp_path: Path) -> None:
    place = cache(pair, tmp_path / "cache")
    shard = max((place / "shards").glob("*.shard"), key=lambda path: path.stat().st_size)
    cache_cases.spoil(shard, -5)
    said = refusal(pair, tmp_path / "run", code=20, teacher__cache=str(place))
    assert shard.name in said and "its checksum does not hold" in said


def test_a_cache_of_other_data_or_of_part_of_it_is_refused(pair: Path, tmp_path: Path) -> None:
    other = tiny.save_text(tmp_path / "other.jsonl", count=30, seed=77)
    place = cache(pair, tmp_path / "other", data__train=str(other))
    assert "a cache of other data" in refusal(pair, tmp_path / "a", teacher__cache=str(place))
    half = cache(pair, tmp_path / "half", data__train_share=0.5)
    assert "rows of the data are not in" in refusal(pair, tmp_path / "b", teacher__cache=str(half))


def test_a_cache_of_another_tokenizer_teacher_temperature_or_signal_is_refused_by_name(
    pair: Path, tmp_path: Path
) -> None:
    place = str(cache(pair, tmp_path / "cache"))
    save(tmp_path / "unigram", "llama", pair_tokenizers.built("unigram with bytes"), width=32, num_layers=1)
    assert "for another tokenizer" in refusal(
        pair, tmp_path / "a", teacher__cache=place, teacher__model=str(tmp_path / "unigram")
    )
    save(tmp_path / "seeded", "llama", pair_tokenizers.built("BPE with bytes"), width=32, num_layers=1, seed=9)
    assert "teacher.weights is" in refusal(
        pair, tmp_path / "b", teacher__cache=place, teacher__model=str(tmp_path / "seeded")
    )
    assert "exact_match compares distributions" in refusal(pair, tmp_path / "c", teacher__cache=place, **EXACT)
    assert "teacher.signal.kind is target in the cache and hybrid here" in refusal(
        pair, tmp_path / "d", teacher__cache=place, teacher__signal__kind="hybrid"
    )
    # A cache of the same teacher for a student of its own family, at another temperature.
    shutil.copytree(pair / "teacher", tmp_path / "same" / "teacher")
    save(tmp_path / "same" / "student", "llama", pair_tokenizers.built("BPE with bytes"), width=16, num_layers=1)
    shutil.copy(pair / "train.jsonl", tmp_path / "same" / "train.jsonl")
    own = load_config(overrides=tiny.settings(tmp_path / "same", **SHORT, objectives__kd__temperature=2.0))
    make_cache(own, tmp_path / "warm", device="cpu")
    said = refusal(pair, tmp_path / "e", teacher__cache=str(tmp_path / "warm"))
    assert "objectives.kd.temperature is 2.0 in the cache and 1.0 here" in said


def test_another_student_s_vocabulary_shares_other_tokens_and_is_refused(pair: Path, tmp_path: Path) -> None:
    place = str(cache(pair, tmp_path / "cache", **EXACT))
    save(tmp_path / "student", "llama", pair_tokenizers.built("unigram with bytes"), width=16, num_layers=1)
    over = {"teacher__cache": place, "student__model": str(tmp_path / "student"), **EXACT}
    assert "teacher.signal.shared_tokens is" in refusal(pair, tmp_path / "run", **over)


@pytest.mark.parametrize("name", ["uld", "span_hidden"])
@pytest.mark.parametrize("way", ["teacher__cache", "teacher__signal__kind"])
def test_objectives_that_need_the_live_teacher_are_refused_by_name(
    pair: Path, tmp_path: Path, name: str, way: str
) -> None:
    asked = {f"objectives__{name}__weight": 0.1, way: "auto" if way == "teacher__cache" else "hybrid"}
    with refused(ConfigError, "", name) as caught:
        run(pair, tmp_path / "run", **asked)
    told = " ".join([str(caught.value), *caught.value.advice])
    assert caught.value.exit_code == 2 and ("leave teacher.cache" in told or "teacher.signal.kind = 'dense'" in told)


def test_answers_that_would_be_biased_are_refused_by_name(pair: Path, tmp_path: Path) -> None:
    said = refusal(pair, tmp_path / "a", teacher__signal__kind="renormalised")
    assert "renormalised" in said and "biased" in said
    with refused(StillroomError, "--temperature", "objectives.alm") as caught:
        make_cache(config(pair), tmp_path / "b", device="cpu", temperatures=[1.0, 2.0])
    assert caught.value.exit_code == 2
    with refused(StillroomError, "--import"):
        import_cache(config(pair), tmp_path / "c", pair / "train.jsonl", "vllm")
    over = {"teacher__signal__kind": "target", "student__model": str(pair / "teacher")}
    same = load_config(overrides=tiny.settings(pair, **over))
    with refused(StillroomError, "teacher.signal.kind", "objectives.alm"):
        distill(same, tmp_path / "d", device="cpu")
