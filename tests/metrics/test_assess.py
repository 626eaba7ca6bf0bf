"""Laws of `stillroom eval`: what is measured beside the yardsticks, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import output, run

from stillroom.metrics.evaluate import assess
from stillroom.telemetry.results import assessment_lines, retained


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "q.jsonl"
    values = [
        {"question": "the still", "answer": "room"},
        {"question": "keeps", "choices": ["spirits and waters", "the maid"], "answer": "A"},
    ]
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_teacher_and_student_stand_side_by_side(world: Path, asked: Path, capsys: Any) -> None:
    words = ["eval", "--model", str(world / "student"), "--data", str(world / "train.jsonl"), "--max-batches", "2"]
    words += ["--teacher", str(world / "teacher"), "--questions", str(asked)]
    found = json.loads(output(capsys, *words, "--json"))
    for role in ("student", "teacher"):
        row = found[role]
        for name in ("disk_megabytes", "load_seconds", "prefill_tokens_per_second", "decode_tokens_per_second"):
            assert row[name] > 0
        assert row["questions"]["questions"] == 2 and 0 <= row["questions"]["exact_match"] <= 1
        size = (world / role / "model.safetensors").stat().st_size
        assert row["disk_megabytes"] == pytest.approx(size / 1e6)
    ratio = found["teacher"]["perplexity"] / found["student"]["perplexity"]
    assert found["retained"]["perplexity"] == pytest.approx(ratio) == pytest.approx(found["retention"])
    assert found["retained"]["parameters"] == found["student"]["parameters"] / found["teacher"]["parameters"]
    text = "\n".join(assessment_lines(found))
    for label in ("retained", "on disk, MB", "load, s", "reading, tokens/s", "writing, tokens/s", "exact match"):
        assert label in text


def test_blocks_score_texts_end_to_end(world: Path) -> None:
    options = {"max_length": 32, "device": "cpu"}
    alone = assess(str(world / "student"), str(world / "train.jsonl"), **options)
    blocks = assess(str(world / "student"), str(world / "train.jsonl"), blocks=True, **options)
    assert alone["student"]["perplexity"] != blocks["student"]["perplexity"]
    assert any("by itself" in note for note in alone["notes"])
    assert any("blocks of 32 tokens" in note for note in blocks["notes"])
    assert not any("by itself" in note for note in blocks["notes"])


def test_what_cannot_be_run_is_refused_before_anything_is_loaded(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "lm_eval" else find(name, *rest)
    )
    words = ["eval", "--model", str(tmp_path / "none"), "--data", "none.jsonl"]
    code, _out, err = run(capsys, *words, "--tasks", "arc_easy,piqa")
    assert code == 2 and "pip install 'stillroom[eval]'" in err
    code, _out, err = run(capsys, *words, "--questions", str(tmp_path / "none.jsonl"))
    assert code == 2 and "cannot be read" in " ".join(err.split())


def test_a_figure_that_one_lacks_is_not_retained() -> None:
    found = retained({"perplexity": 20.0, "parameters": 5}, {"perplexity": 10.0, "disk_megabytes": 3.0})
    assert found == {"perplexity": 0.5}
    asked = {"questions": {"exact_match": 0.2}}, {"questions": {"exact_match": 0.0}}
    assert retained(*asked) == {}  # nothing can be retained of nothing
