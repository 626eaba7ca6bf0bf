"""Caches and runs with a teacher on llama.cpp's server: the imitation in CI, the real program by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import cache_cases
import pytest
import real_llama
import tiny
import torch
from llama_model import LlamaCppModel
from refusals import refused
from served_model import serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillroom.config import load_config
from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import ConfigError, ServerUnusable
from stillroom.export.folder import export
from stillroom.teachers.cache.reader import Cache
from stillroom.teachers.served.teacher import open_server
from stillroom.telemetry import read_events
from stillroom.training.distill import distill
from stillroom.training.write_cache import make_cache

SHORT = {
    "train__max_steps": 4,
    "train__eval_steps": 2,
    "eval__samples": 0,
    "precision__mode": "fp32",
    "teacher__signal__kind": "top_k",
    "teacher__signal__k": 12,
}
FAST = {"teacher__requests__pause_seconds": 0.01, "teacher__requests__retries": 3}
K = 16
STEPS_OF_STORAGE = 3  # log-probabilities that differ by a rounding may fall into neighbouring steps of what is stored


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cache_cases.save_world(tmp_path_factory.mktemp("llama"))


def config(world: Path, **over: Any) -> Any:
    return load_config(overrides=tiny.settings(world, **{**SHORT, **over}))


def answers(folder: Path) -> dict[str, Any]:
    cache = Cache(folder)
    keys = [shard.keys[row].tobytes().hex() for shard in cache.shards for row in range(shard.num_rows)]
    return {key: cache.answer(key) for key in keys}


def losses(folder: Path) -> list[float]:
    return [event["train_loss"] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def check_like_here(world: Path, url: str, tmp_path: Path, **less: Any) -> dict[str, Any]:
    """A cache and a run with this server, beside those of the same teacher on this machine. The run's summary."""
    over = {"teacher__server": url, **FAST, **less}
    make_cache(config(world, **less), tmp_path / "cache here", device="cpu")
    make_cache(config(world, **over), tmp_path / "cache there", device="cpu")
    ours, theirs = answers(tmp_path / "cache there"), answers(tmp_path / "cache here")
    assert ours.keys() == theirs.keys() and len(ours) > 5
    for key, answer in ours.items():
        assert abs(answer.log_probs.astype(int) - theirs[key].log_probs.astype(int)).max() <= STEPS_OF_STORAGE
        assert abs(answer.label.astype(int) - theirs[key].label.astype(int)).max() <= STEPS_OF_STORAGE
        assert (answer.ids == theirs[key].ids).mean() > 0.98
    distill(config(world, **less), tmp_path / "here", device="cpu")
    distill(config(world, **over), tmp_path / "there", device="cpu")
    assert losses(tmp_path / "there") == pytest.approx(losses(tmp_path / "here"), rel=2e-3)
    summary: dict[str, Any] = json.loads((tmp_path / "there" / "summary.json").read_bytes())
    return summary


def test_a_cache_and_a_run_are_those_of_the_same_teacher_here(world: Path, tmp_path: Path) -> None:
    with serving(world / "teacher", kind=LlamaCppModel) as served:
        less = {"train__max_steps": 2, "train__batch_size": 2, "data__max_records": 24}
        less["teacher__requests__check_temperature"] = False  # 512 more requests each
        summary = check_like_here(world, served.url, tmp_path, **less)
        assert summary["teacher_server"]["server_version"] == "llama.cpp b0-unknown"


# -- the real program ------------------------------------------------------------------------------------

real = [pytest.mark.slow, pytest.mark.skipif(not real_llama.IS_HERE, reason=real_llama.REASON)]


def as_file(folder: Path, out: Path) -> Path:
    export(str(folder), out, format="gguf", form="float32")
    return out / "model-float32.gguf"


class TestReal:
    pytestmark = real

    def test_the_answers_are_those_of_our_own_forward(self, world: Path, tmp_path: Path) -> None:
        """Every id of the vocabulary stands in a row: parts of characters and special tokens too."""
        words = AutoTokenizer.from_pretrained(world / "teacher")
        section = {"model": str(world / "teacher")}
        network = AutoModelForCausalLM.from_pretrained(world / "teacher", dtype=torch.float32).eval()
        with real_llama.serving_file(as_file(world / "teacher", tmp_path / "out")) as url:
            told = TeacherConfig.model_validate({**section, "server": url})
            server = open_server(told, words, num_wanted=K, vocab_size=tiny.VOCAB)
            rows = [[5, *range(begin, begin + 80)] for begin in range(0, tiny.VOCAB, 80)]
            given = [server.score(row) for row in rows]
        assert server.shape.name == "llama.cpp" and server.notes == ()
        for row, one in zip(rows, given, strict=True):
            with torch.no_grad():
                log_probs = torch.log_softmax(network(torch.tensor([row])).logits[0], -1)
            for place, entry in one.entries.items():
                ours = log_probs[place - 1]
                assert entry == {token: pytest.approx(float(ours[token]), abs=1e-3) for token in entry}
                edge = float(ours.topk(K).values[-1])
                assert all(float(ours[token]) > edge - 1e-3 for token in entry if token != row[place])

    def test_a_cache_and_a_run_are_those_of_the_same_teacher_here(self, world: Path, tmp_path: Path) -> None:
        thin = Path(shutil.copytree(world, tmp_path / "world"))
        with real_llama.serving_file(as_file(world / "teacher", tmp_path / "out"), num_slots=4, context=2048) as url:
            summary = check_like_here(thin, f"{url}/v1/", tmp_path)
        assert summary["teacher_server"]["served_model"] == "out"
        assert not [name for name in summary["teacher_server"] if name.startswith("repeated")]

    def test_a_server_that_comes_back_with_another_model_is_noticed(self, world: Path, tmp_path: Path) -> None:
        other = tiny.save_trained(tmp_path / "other", width=32, num_layers=1, steps=5)
        first, second = as_file(world / "teacher", tmp_path / "out"), as_file(other, tmp_path / "new" / "out")
        words = AutoTokenizer.from_pretrained(world / "teacher")
        with real_llama.serving_file(first) as url:
            told = TeacherConfig.model_validate({"model": str(world / "teacher"), "server": url})
            server = open_server(told, words, num_wanted=K, vocab_size=tiny.VOCAB)
        port = int(url.rpartition(":")[2])
        with (
            real_llama.serving_file(second, port=port),
            refused(ServerUnusable, "", "probe"),
        ):
            server.check_again()

    def test_rows_beyond_a_slots_context_are_refused(self, world: Path, tmp_path: Path) -> None:
        """The context is that of a slot, and at most the model's own."""
        file = as_file(world / "teacher", tmp_path / "out")
        long = {"data__max_length": 400, "data__packing": "blocks"}
        with real_llama.serving_file(file, num_slots=2, context=512) as url:
            over = {"teacher__server": url, **FAST, **long}
            with refused(ConfigError, "data.max_length", "128"):
                make_cache(config(world, **over), tmp_path / "cache", device="cpu")
