"""Whole runs of a student that takes the teacher's vocabulary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import commands
import pair_tokenizers
import pytest
import tiny
import torch
from refusals import refused
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillroom.config import load_config
from stillroom.core.errors import ConfigError, Interrupted
from stillroom.data.two_tokenizers.align import pieces_of
from stillroom.export.folder import export
from stillroom.metrics.evaluate import assess
from stillroom.models.load import student_shape
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume
from stillroom.training.finish import Result
from stillroom.training.loop import Stop
from stillroom.training.write_cache import make_cache

TEACHERS, OWN = "byte-level", "BPE with bytes"


def save(folder: Path, family: str, tokenizer: Any, padding: int = 0, **size: Any) -> Path:
    tiny.save_model(folder, family, vocab_size=len(tokenizer) + padding, with_tokenizer=False, **size)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both heads are padded, as those of real models are."""
    folder = tmp_path_factory.mktemp("surgery")
    save(folder / "teacher", "llama", pair_tokenizers.built(TEACHERS), padding=10, width=48, seed=3)
    save(folder / "student", "llama", pair_tokenizers.built(OWN), padding=6, num_layers=1, seed=4)
    save(folder / "tied", "gpt2", pair_tokenizers.built(OWN), num_layers=1, seed=5)
    tiny.save_text(folder / "train.jsonl", 120)
    return folder


def settings(folder: Path, **over: Any) -> dict[str, Any]:
    short = {"train__max_steps": 4, "train__eval_steps": 4, "eval__samples": 1, "student__vocabulary": "teacher"}
    return tiny.settings(folder, **{**short, **over})


def run(folder: Path, out: Path, **over: Any) -> Result:
    return distill(load_config(overrides=settings(folder, **over)), out, device="cpu")


def notes(folder: Path) -> list[str]:
    return [event["text"] for event in read_events(folder / "events.jsonl") if event["event"] == "note"]


@pytest.mark.parametrize("student", ["student", "tied"])
def test_a_student_with_the_teacher_s_tokens_learns_by_kd_and_is_exported(
    pair: Path, tmp_path: Path, student: str
) -> None:
    done = run(pair, tmp_path / "run", student__model=str(pair / student))
    assert done.summary["status"] == "done" and done.summary["skipped"] == 0
    assert done.summary["student"]["kl"] < done.summary["student_before"]["kl"]
    teachers = pair_tokenizers.built(TEACHERS)
    (told,) = [note for note in notes(done.folder) if note.startswith("student.vocabulary")]
    pieces = pieces_of(teachers, pair_tokenizers.built(OWN))
    assert f"{pieces.num_copied:,} copied from a token of the same bytes" in told
    assert f"{pieces.num_averaged:,} the mean of several" in told
    left = AutoTokenizer.from_pretrained(done.folder / "student")
    assert left.get_vocab() == teachers.get_vocab()
    config = json.loads((done.folder / "student" / "config.json").read_text())
    assert config["vocab_size"] == len(teachers) and config["eos_token_id"] == teachers.eos_token_id
    export(str(done.folder), tmp_path / "out")
    measured = assess(str(tmp_path / "out"), str(pair / "train.jsonl"), teacher=str(pair / "teacher"), device="cpu")
    assert measured["student"]["kl"] is not None, "one tokenizer: compared token by token"


def test_the_run_begins_with_the_student_s_own_rows(pair: Path, tmp_path: Path) -> None:
    done = run(pair, tmp_path / "run", train__max_steps=1, train__eval_steps=1, train__learning_rate=1e-12)
    tables = [
        AutoModelForCausalLM.from_pretrained(folder).get_output_embeddings().weight
        for folder in (done.folder / "student", pair / "student")
    ]
    pieces = pieces_of(pair_tokenizers.built(TEACHERS), pair_tokenizers.built(OWN))
    for token, own in enumerate(pieces.tokens):
        assert torch.allclose(tables[0][token], tables[1][list(own)].mean(0), atol=1e-6), token


def test_n_steps_equal_k_and_n_minus_k(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(pair, tmp_path / "whole")
    wanted = iter([False, False, True])
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, False))
        with pytest.raises(Interrupted):
            run(pair, tmp_path / "parts")
    parts = resume(tmp_path / "parts", device="cpu")
    one, other = ((done.folder / "student" / "model.safetensors").read_bytes() for done in (whole, parts))
    assert one == other


def test_stored_answers_of_the_teacher_serve_it(pair: Path, tmp_path: Path) -> None:
    done = run(pair, tmp_path / "run", teacher__cache="auto")
    assert done.summary["status"] == "done"
    make_cache(load_config(overrides=settings(pair)), tmp_path / "answers", device="cpu")
    done = run(pair, tmp_path / "again", teacher__cache=str(tmp_path / "answers"))
    assert done.summary["status"] == "done"


def test_a_plan_counts_the_rows_of_the_teacher_s_vocabulary(pair: Path) -> None:
    config = load_config(overrides=settings(pair))
    with FakeTensorMode():
        network, told = student_shape(config.student, config.teacher, recomputes=False)
    assert network.get_input_embeddings().weight.shape[0] == len(pair_tokenizers.built(TEACHERS)) + 10
    assert any("takes the teacher's vocabulary" in note for note in told)


def test_the_doctor_sees_one_tokenizer(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for key, value in settings(pair).items() for word in ("--set", f"{key}={value}")]
    _code, out, err = commands.run(capsys, "doctor", *words)
    assert "one tokenizer for both" in " ".join((out + err).split()) and "different vocabularies" not in out + err


def test_the_same_tokens_leave_the_student_as_it_is(pair: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(pair / "teacher", tmp_path / "student")
    done = run(pair, tmp_path / "run", student__model=str(folder))
    (told,) = [note for note in notes(done.folder) if note.startswith("student.vocabulary")]
    assert told.endswith("nothing was changed")
    config = json.loads((done.folder / "student" / "config.json").read_text())
    assert config["vocab_size"] == len(pair_tokenizers.built(TEACHERS)) + 10


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"student__init": "shrink", "student__shrink__layers": 1}, "vocabulary"),
        ({"student__init": "random"}, "init = 'random'"),
        ({"student__adapter": {"rank": 2}}, "adapter"),
        ({"objectives__alm__weight": 0.5}, "alm"),
    ],
)
def test_what_a_changed_vocabulary_cannot_have_is_refused_by_name(pair: Path, over: dict[str, Any], words: str) -> None:
    with refused(ConfigError, "", words) as caught:
        load_config(overrides=settings(pair, **over))
    assert caught.value.exit_code == 2


def test_a_student_without_weights_has_no_embeddings_to_keep(pair: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(pair / "student", tmp_path / "student")
    (folder / "model.safetensors").unlink()
    with refused(ConfigError, "student.vocabulary") as caught:
        run(pair, tmp_path / "run", student__model=str(folder))
    assert caught.value.exit_code == 2


def test_another_vocabulary_is_refused_with_the_key_as_advice(pair: Path, tmp_path: Path) -> None:
    with refused(ConfigError, "teacher.model, student.model") as caught:
        run(pair, tmp_path / "run", student__vocabulary="own")
    assert any("student.vocabulary=teacher" in one for one in caught.value.advice)
