"""Pairs of tokenizers that cannot be compared end with a clear message and exit code 2, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import commands
import pair_tokenizers
import pytest
import tiny


def save(folder: Path, tokenizer: Any) -> Path:
    tiny.save_model(folder, "llama", vocab_size=len(tokenizer), with_tokenizer=False, width=16, num_layers=1)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    save(tmp_path / "teacher", pair_tokenizers.built("BPE with bytes"))
    save(tmp_path / "student", pair_tokenizers.built("byte-level"))
    tiny.save_text(tmp_path / "train.jsonl", 40)
    return tmp_path


def refusal(pair: Path, capsys: pytest.CaptureFixture[str], **over: object) -> str:
    """What is said when the pair is distilled, on one line. It ends with exit code 2 and writes no student."""
    distill = [*commands.arguments(pair, pair / "run", **over), "--preset", "cross-tokenizer"]
    code, _out, err = commands.run(capsys, *distill)
    assert code == 2, err
    assert "Traceback" not in err and not (pair / "run" / "student").exists()
    return " ".join(err.split())


@pytest.mark.parametrize("role", ["teacher", "student"])
def test_a_tokenizer_that_drops_bytes(pair: Path, capsys: pytest.CaptureFixture[str], role: str) -> None:
    save(pair / "spaceless", pair_tokenizers.spaceless())
    over = {f"{role}__model": str(pair / "spaceless"), "data__min_coverage": 0.9}
    said = refusal(pair, capsys, **over)
    assert "dropped or changed by one of them" in said and "data.min_coverage" in said


@pytest.mark.parametrize("role", ["teacher", "student"])
def test_a_tokenizer_without_places(pair: Path, capsys: pytest.CaptureFixture[str], role: str) -> None:
    """ByT5's tokenizer is written in Python and has no tokenizer.json."""
    folder = pair / "slow"
    tiny.save_model(folder, "llama", vocab_size=384, with_tokenizer=False, width=16, num_layers=1)
    settings = {"tokenizer_class": "ByT5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    said = refusal(pair, capsys, **{f"{role}__model": str(folder)})
    assert f"the {role}'s tokenizer" in said and "does not say where its tokens stand" in said


@pytest.mark.parametrize("role", ["teacher", "student"])
def test_an_end_mark_that_is_no_token(pair: Path, capsys: pytest.CaptureFixture[str], role: str) -> None:
    path = pair / role / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "eos_token": "<|no such token|>"}))
    said = refusal(pair, capsys)
    assert "goes up to token id" in said and "use the tokenizer the model was made with" in said


def test_eval_refuses_a_tokenizer_without_places_too(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pair / "slow"
    tiny.save_model(folder, "llama", vocab_size=384, with_tokenizer=False, width=16, num_layers=1)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    words = ["eval", "--model", str(pair / "student"), "--teacher", str(folder), "--data", str(pair / "train.jsonl")]
    code, _out, err = commands.run(capsys, *words, "--device", "cpu")
    assert code == 2 and "does not say where its tokens stand" in " ".join(err.split())
