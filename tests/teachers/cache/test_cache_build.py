"""Whole runs from a cache beside the same runs from the live teacher."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import cache_cases
import fsspec
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from stillroom.config import load_config
from stillroom.core.errors import ConfigError, DataError, Interrupted, StillroomError
from stillroom.models import load as loading
from stillroom.teachers.cache.reader import Cache
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume
from stillroom.training.loop import Stop
from stillroom.training.write_cache import make_cache

SHORT = {"train__max_steps": 6, "train__eval_steps": 3, "eval__samples": 0, "precision__mode": "fp32"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world of few rows, some of them with a prompt."""
    return cache_cases.save_world(tmp_path_factory.mktemp("small"))


def config(world: Path, **over: Any) -> Any:
    return load_config(overrides=tiny.settings(world, **{**SHORT, **over}))


def cache(world: Path, out: Path, **over: Any) -> Path:
    make_cache(config(world, **over), out, device="cpu")
    return out


def run(world: Path, out: Path, **over: Any) -> Path:
    distill(config(world, **over), out, device="cpu")
    return out


def steps(folder: Path) -> list[tuple[float, float]]:
    events = read_events(folder / "events.jsonl")
    return [(event["train_loss"], event["grad_norm"]) for event in events if event["event"] == "step"]


def notes(folder: Path) -> str:
    events = read_events(folder / "events.jsonl")
    return "\n".join(event["text"] for event in events if event["event"] == "note")


def assert_same_run(one: Path, other: Path) -> None:
    assert steps(one) == steps(other)
    mine, theirs = (load_file(folder / "student" / "model.safetensors") for folder in (one, other))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


KINDS: dict[str, dict[str, Any]] = {
    "hybrid": {"teacher__signal__kind": "hybrid"},
    "sampled": {"teacher__signal__kind": "sampled", "teacher__signal__draws": 20},
    "top-k, reverse KL": {
        "teacher__signal__kind": "top_k",
        "teacher__signal__k": 16,
        "objectives__kd__divergence": "reverse_kl",
    },
    "label residual": {"teacher__signal__kind": "top_k", "objectives__kd__on_wrong_teacher": "label_residual"},
    "renormalised": {"teacher__signal__kind": "renormalised", "teacher__signal__k": 8},
    "temperature 2": {"teacher__signal__kind": "hybrid", "objectives__kd__temperature": 2.0},
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_from_the_cache_is_the_live_run_bit_for_bit(small: Path, tmp_path: Path, kind: str) -> None:
    """Shuffled, over several epochs, accumulated, in other batches than those the cache was written in."""
    over = {
        **KINDS[kind],
        "train__batch_size": 3,
        "train__gradient_accumulation_steps": 2,
        "train__max_steps": 9,
        "data__train_share": 0.4,
        "objectives__ce__weight": 0.1,
    }
    live = run(small, tmp_path / "live", **over)
    place = cache(small, tmp_path / "cache", **{**over, "train__batch_size": 8})
    stored = run(small, tmp_path / "stored", teacher__cache=str(place), **over)
    assert_same_run(live, stored)
    assert "is not loaded" in notes(stored) and "answers live" in notes(live)


@pytest.mark.parametrize("packing", ["rows", "blocks"])
def test_packed_or_padded_every_row_is_found(small: Path, tmp_path: Path, packing: str) -> None:
    over = {"data__packing": packing, "teacher__signal__kind": "hybrid"}
    place = cache(small, tmp_path / "cache", **over)
    stored = run(small, tmp_path / "stored", teacher__cache=str(place), **over)
    assert_same_run(run(small, tmp_path / "live", **over), stored)
    assert json.loads((stored / "summary.json").read_bytes())["teacher_signal"]["unknown_positions"] == 0


def test_the_teacher_is_not_loaded_and_its_files_need_not_be_here(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = cache(small, tmp_path / "cache")
    moved = Path(shutil.copytree(small, tmp_path / "elsewhere"))
    shutil.rmtree(moved / "teacher")
    monkeypatch.setattr(loading, "load_teacher", lambda *_: pytest.fail("the teacher was loaded"))
    stored = run(moved, tmp_path / "run", teacher__cache=str(place))
    assert "cannot be told" in notes(stored)
    summary = json.loads((stored / "summary.json").read_bytes())
    assert summary["teacher"]["perplexity"] > 1 and summary["teacher"]["source"] == "stored answers"


def test_evaluation_from_a_cache_keeps_the_meaning_of_kl_and_agreement(small: Path, tmp_path: Path) -> None:
    whole = run(small, tmp_path / "whole")
    over = {"teacher__signal__kind": "hybrid", "teacher__signal__m": 12, "teacher__signal__draws": 40}
    place = cache(small, tmp_path / "cache", **over)
    stored = run(small, tmp_path / "stored", teacher__cache=str(place), **over)
    mine, theirs = (json.loads((folder / "summary.json").read_bytes())["student_before"] for folder in (stored, whole))
    assert mine["kl"] == pytest.approx(theirs["kl"], rel=0.03) and mine["agreement"] == theirs["agreement"]
    assert mine["top5_agreement"] == theirs["top5_agreement"] > mine["agreement"]
    assert mine["top5_overlap"] == pytest.approx(theirs["top5_overlap"])
    assert mine["acceptance"] is None and theirs["acceptance"] is not None
    assert mine["perplexity"] == theirs["perplexity"]
    assert "taken from the stored answers" in notes(stored)


def test_the_finished_student_can_be_compared_with_the_teacher_itself(small: Path, tmp_path: Path) -> None:
    place = cache(small, tmp_path / "cache")
    stored, whole = (
        json.loads((run(small, tmp_path / word, teacher__cache=str(place), **over) / "summary.json").read_bytes())
        for word, over in (("stored", {}), ("whole", {"teacher__signal__compare": "whole"}))
    )
    assert whole["student"]["acceptance"] is not None and stored["student"]["acceptance"] is None
    assert whole["student"]["perplexity"] == stored["student"]["perplexity"]
    assert whole["student"]["kl"] == pytest.approx(stored["student"]["kl"], rel=0.05)
    assert "loaded for it at the end" in notes(tmp_path / "whole")


def test_a_live_sparse_teacher_is_still_compared_over_the_whole_vocabulary(small: Path, tmp_path: Path) -> None:
    sparse, whole = (
        json.loads((run(small, tmp_path / kind, teacher__signal__kind=kind) / "summary.json").read_bytes())
        for kind in ("hybrid", "dense")
    )
    assert sparse["student_before"]["kl"] == pytest.approx(whole["student_before"]["kl"], rel=1e-5)
    assert sparse["student_before"]["acceptance"] == pytest.approx(whole["student_before"]["acceptance"], rel=1e-5)
    assert 0.5 < sparse["teacher_signal"]["mean_mass"] <= 1.0


def test_automatic_writes_once_beside_the_run_and_reads_ever_after(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(small, tmp_path / "first", teacher__cache="auto")
    (place,) = tmp_path.glob("teacher-cache-*")
    before = Cache(place).num_rows
    monkeypatch.setattr(loading, "load_teacher", lambda *_: pytest.fail("the teacher was loaded again"))
    second = run(small, tmp_path / "second", teacher__cache="auto")
    assert_same_run(first, second)
    assert [*tmp_path.glob("teacher-cache-*")] == [place] and Cache(place).num_rows == before
    monkeypatch.undo()
    assert_same_run(run(small, tmp_path / "live", teacher__signal__kind="hybrid"), first)


def test_automatic_adds_what_is_missing(small: Path, tmp_path: Path) -> None:
    run(small, tmp_path / "part", teacher__cache="auto", data__train_share=0.4)
    (place,) = tmp_path.glob("teacher-cache-*")
    held = Cache(place).num_rows
    run(small, tmp_path / "all", teacher__cache="auto")
    assert Cache(place).num_rows > held


def test_a_cached_run_resumes_bit_for_bit(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = cache(small, tmp_path / "cache")
    whole = run(small, tmp_path / "whole", teacher__cache=str(place))
    asked = 0

    def is_wanted(self: Stop) -> bool:
        nonlocal asked
        asked += 1
        self.reason = "test" if asked > 6 else ""
        return bool(self.reason)

    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", is_wanted)
        with pytest.raises(Interrupted):
            run(small, tmp_path / "cut", teacher__cache=str(place))
    resume(tmp_path / "cut", device="cpu")
    mine, theirs = (load_file(folder / "student" / "model.safetensors") for folder in (whole, tmp_path / "cut"))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts the open files")
def test_cached_runs_in_one_process_leave_no_file_open(small: Path, tmp_path: Path) -> None:
    stored = cache(small, tmp_path / "cache")
    counts = []
    for number in range(3):
        run(small, tmp_path / str(number), teacher__cache=str(stored), train__max_steps=1, train__eval_steps=1)
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert counts[2] <= counts[0]


@pytest.mark.parametrize("spec", ["teacher_nan@2", "bad_batch@2", "teacher_garbage@3", "all_masked@2"])
def test_faults_strike_a_cached_run_and_it_goes_on(small: Path, tmp_path: Path, spec: str) -> None:
    place = cache(small, tmp_path / "cache")
    distill(config(small, teacher__cache=str(place)), tmp_path / "run", device="cpu", inject=spec)
    assert f"injected {spec.partition('@')[0]}" in notes(tmp_path / "run")


# -- refusals --------------------------------------------------------------------------------------------


def refused(small: Path, out: Path, *words: str, code: int = 2, **over: Any) -> StillroomError:
    with pytest.raises(StillroomError) as caught:
        run(small, out, **over)
    assert caught.value.exit_code == code and caught.value.advice, caught.value
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    return caught.value


def test_rows_that_are_missing_are_counted_and_can_be_added(small: Path, tmp_path: Path) -> None:
    place = cache(small, tmp_path / "cache", data__train_share=0.5)
    error = refused(small, tmp_path / "run", "rows of the data are not in", teacher__cache=str(place))
    assert isinstance(error, DataError) and "stillroom cache" in error.advice[0]
    cache(small, place)
    run(small, tmp_path / "run", teacher__cache=str(place))


def test_a_cache_of_other_data_is_refused(small: Path, tmp_path: Path) -> None:
    place = cache(small, tmp_path / "cache")
    other = tiny.save_text(tmp_path / "other.jsonl", count=40, seed=77)
    assert refused(small, tmp_path / "run", "a cache of other data", teacher__cache=str(place), data__train=str(other))


def test_a_cache_of_another_teacher_is_refused_with_what_differs(small: Path, tmp_path: Path) -> None:
    place = cache(small, tmp_path / "cache")
    other = Path(shutil.copytree(small / "teacher", tmp_path / "teacher"))
    weights = load_file(other / "model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[0] += 1e-3
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert refused(small, tmp_path / "a", "teacher.weights is", teacher__cache=str(place), teacher__model=str(other))
    over = {"teacher__cache": str(place), "teacher__dtype": "bfloat16"}
    assert refused(small, tmp_path / "b", "teacher.dtype is float32 in the cache and bfloat16 here", **over)


def test_a_cache_at_another_temperature_or_of_another_signal_is_refused(small: Path, tmp_path: Path) -> None:
    place = cache(small, tmp_path / "cache")
    over = {"teacher__cache": str(place)}
    assert refused(small, tmp_path / "a", "objectives.kd.temperature is 1.0 in the cache and 2.0 here", **over,
            objectives__kd__temperature=2.0)  # fmt: skip
    assert refused(small, tmp_path / "b", "teacher.signal.draws is 12 in the cache and 5 here", **over,
            teacher__signal__kind="hybrid", teacher__signal__draws=5)  # fmt: skip
    assert refused(small, tmp_path / "c", "teacher.signal.kind is hybrid in the cache and top_k here", **over,
            objectives__kd__top_k=32)  # fmt: skip
    assert refused(small, tmp_path / "d", "reverse_kl cannot be estimated from sampled teacher answers", **over,
            objectives__kd__divergence="reverse_kl")  # fmt: skip


def test_a_cache_for_another_tokenizer_is_refused(small: Path, tmp_path: Path) -> None:
    place = cache(small, tmp_path / "cache")
    tiny.tokenizer(seed=5).save_pretrained(tmp_path / "words")
    other = Path(shutil.copytree(small / "student", tmp_path / "student"))
    tiny.tokenizer(vocab_size=300, seed=9).save_pretrained(other)
    assert refused(small, tmp_path / "run", "another tokenizer", teacher__cache=str(place), student__model=str(other))


def test_a_damaged_cache_ends_the_run_before_it_begins(small: Path, tmp_path: Path) -> None:
    place = cache(small, tmp_path / "cache")
    (path,) = (place / "shards").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert refused(small, tmp_path / "run", path.name, "cut short", code=20, teacher__cache=str(place))


def test_a_folder_without_a_cache_is_refused_with_the_command_that_makes_one(small: Path, tmp_path: Path) -> None:
    error = refused(small, tmp_path / "run", "holds no teacher cache", teacher__cache=str(tmp_path / "nothing"))
    assert "stillroom cache CONFIG --out" in error.advice[0]


@pytest.mark.parametrize(
    ("over", "word"),
    [
        ({"objectives.feature.weight": 0.3, "teacher.cache": "x"}, "look inside the teacher"),
        ({"objectives.feature.weight": 0.3, "teacher.signal.kind": "top_k"}, "look inside the teacher"),
        ({"teacher.cache": "x", "teacher.signal.kind": "dense"}, "holds no dense answers"),
        ({"teacher.signal.kind": "top_k", "teacher.signal.draws": 3}, "draws is not read"),
        ({"teacher.signal.kind": "hybrid", "teacher.router.mode": "sar"}, "needs teacher.signal.kind = 'dense'"),
    ],
)
def test_settings_that_cannot_go_together_are_refused_by_name(over: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load_config(overrides=over)


def test_a_run_from_a_cache_in_a_store_is_the_run_from_that_cache_here(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "copies"))
    place = cache(small, tmp_path / "cache")
    store = fsspec.filesystem("memory")
    store.store.clear()
    cache(small, Path("memory://bucket/cache"))  # written there
    try:
        names = {path.removeprefix("/bucket/cache/"): path for path in store.find("/bucket/cache")}
        sound = {name: (place / name).read_bytes() for name in names}
        assert {name: store.cat_file(path) for name, path in names.items()} == sound and len(sound) > 1
        here = run(small, tmp_path / "here", teacher__cache=str(place))
        there = run(small, tmp_path / "there", teacher__cache="memory://bucket/cache")
        assert_same_run(here, there)
        shard = next(path for path in store.find("/bucket/cache") if path.endswith(".shard"))
        held = bytearray(store.cat_file(shard))
        held[40] ^= 1
        store.pipe_file(shard, bytes(held))
        with pytest.raises(StillroomError, match="changed") as caught:
            run(small, tmp_path / "damaged", teacher__cache="memory://bucket/cache")
        assert caught.value.exit_code == 20
    finally:
        store.store.clear()
