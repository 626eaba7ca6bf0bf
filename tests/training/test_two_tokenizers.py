"""Whole runs of a teacher and a student with a tokenizer each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pair_tokenizers
import pytest
import tiny
import torch
from refusals import refused
from safetensors.torch import load_file

from stillroom.config import load_config
from stillroom.core.errors import ConfigError, Interrupted
from stillroom.core.types import Evidence, Verdict
from stillroom.metrics.evaluate import assess
from stillroom.telemetry import read_events
from stillroom.telemetry.events import problems
from stillroom.training.distill import distill, resume
from stillroom.training.finish import Result
from stillroom.training.guard import Guard
from stillroom.training.loop import Stop


def save(folder: Path, family: str, tokenizer: Any, **size: Any) -> Path:
    tiny.save_model(folder, family, vocab_size=len(tokenizer), with_tokenizer=False, **size)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save(folder / "teacher", "llama", pair_tokenizers.built("BPE with bytes"), width=48, seed=3)
    save(folder / "student", "gpt2", pair_tokenizers.built("byte-level"), width=32, num_layers=1, seed=4)
    tiny.save_text(folder / "train.jsonl", 120)
    return folder


def run(folder: Path, out: Path, **over: Any) -> Result:
    settings = tiny.settings(folder, **{"train__max_steps": 3, "train__eval_steps": 3, **over})
    return distill(load_config(preset="cross-tokenizer", overrides=settings), out, device="cpu")


@pytest.mark.parametrize(
    ("precision", "over"),
    [
        ("fp32", {"objectives__exact_match__weight": 0.3}),
        ("fp16-master", {"teacher__dtype": "float16", "objectives__uld__weight": 0.1}),
        ("fp16-mixed", {"objectives__span_hidden__weight": 0.1, "data__packing": "packed"}),
        ("fp16-split", {"objectives__exact_match__weight": 0.3, "teacher__dtype": "float16"}),
        ("fp16-sr", {"objectives__exact_match__weight": 0.3, "objectives__uld__weight": 0.1}),
    ],
)
def test_a_teacher_of_another_tokenizer_teaches(
    pair: Path, tmp_path: Path, precision: str, over: dict[str, Any]
) -> None:
    summary = run(pair, tmp_path / "run", precision__mode=precision, eval__samples=1, **over).summary
    assert summary["status"] == "done" and summary["skipped"] == 0
    assert summary["two_tokenizers"]["share"] == 1.0 and summary["two_tokenizers"]["left_out_bytes"] == 0
    assert summary["student"]["bits_per_byte"] < summary["student_before"]["bits_per_byte"]
    assert summary["teacher"]["bits_per_byte"] > 0 and summary["student"]["kl_per_byte"] > 0
    assert summary["teacher"]["perplexity"] is None, "a mean over other tokens is not compared"
    assert summary["student"]["kl"] is None and summary["student"]["agreement"] is None
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert not [fault for event in events for fault in problems(event)]
    notes = [note for event in events if event["event"] == "run_start" for note in event["data"]["notes"]]
    assert any(note.startswith("two tokenizers: 100.0%") for note in notes)
    steps = [event for event in events if event["event"] == "step"]
    terms = {"ce", "alm", "prefix_match", *(name.split("__")[1] for name in over if name.startswith("objectives"))}
    assert all(set(step["terms"]) == terms for step in steps)
    (sample,) = [event for event in events if event["event"] == "sample"]
    assert sample["teacher"] and sample["student"]


def test_training_and_evaluation_score_the_same_batch_alike(pair: Path, tmp_path: Path) -> None:
    """One step at rate 0 on the held-out text itself: its terms are those of the evaluation after it."""
    text = tiny.save_text(tmp_path / "few.jsonl", 8, seed=9)
    over = {
        "data__train": str(text), "data__eval": str(text), "data__packing": "rows", "data__max_length": 128,
        "train__batch_size": 8, "train__learning_rate": 1e-12, "train__max_steps": 1, "train__eval_steps": 1,
        "objectives__exact_match__weight": 0.3, "eval__max_batches": 0,
    }  # fmt: skip
    student = save(tmp_path / "student", "llama", pair_tokenizers.built("byte-level"), num_layers=1)  # without dropout
    run(pair, tmp_path / "run", student__model=str(student), **over)
    events = read_events(tmp_path / "run" / "events.jsonl")
    step = next(event for event in events if event["event"] == "step")
    evaluation = [event for event in events if event["event"] == "eval"][-1]
    assert set(step["terms"]) == set(evaluation["terms"]) == {"ce", "alm", "prefix_match", "exact_match"}
    for name, term in step["terms"].items():
        assert evaluation["terms"][name]["raw"] == pytest.approx(term["raw"], rel=1e-5), name


def test_another_vocabulary_is_refused_by_token_objectives_with_the_preset_as_advice(
    pair: Path, tmp_path: Path
) -> None:
    config = load_config(overrides=tiny.settings(pair))
    with refused(ConfigError, "teacher.model, student.model") as caught:
        distill(config, tmp_path / "run", device="cpu")
    assert caught.value.exit_code == 2 and any("cross-tokenizer" in one for one in caught.value.advice)


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"objectives__kd__weight": 0.5}, "kd"),
        ({"objectives__feature__weight": 0.5}, "feature"),
        ({"teacher__router__mode": "sar-meta"}, "teacher.router.mode"),
        ({"student__init": "shrink", "student__shrink__layers": 1}, "student.init"),
        ({"data__min_coverage": 1.0, "data__train": "odd"}, "%"),
    ],
)
def test_what_two_tokenizers_cannot_have_is_refused_by_name(
    pair: Path, tmp_path: Path, over: dict[str, Any], words: str
) -> None:
    if over.get("data__train") == "odd":  # SentencePiece reads U+2581 as a space
        lines = [json.dumps({"text": f"{line} \u2581{number}"}) for number, line in enumerate(tiny.sentences(40, 2))]
        (tmp_path / "odd.jsonl").write_text("\n".join(lines), encoding="utf-8")
        over = {**over, "data__train": str(tmp_path / "odd.jsonl")}
    with refused(ConfigError, "", words) as caught:
        run(pair, tmp_path / "run", **over)
    assert caught.value.exit_code == 2


def test_a_tokenizer_that_drops_bytes_is_refused(pair: Path, tmp_path: Path) -> None:
    save(tmp_path / "teacher", "llama", pair_tokenizers.spaceless(), width=16)
    with refused(ConfigError, "teacher.model, student.model") as caught:
        run(pair, tmp_path / "run", teacher__model=str(tmp_path / "teacher"), data__min_coverage=0.9)
    assert caught.value.exit_code == 2


def test_a_model_is_assessed_beside_a_teacher_of_another_tokenizer(pair: Path) -> None:
    result = assess(str(pair / "student"), str(pair / "train.jsonl"), teacher=str(pair / "teacher"), max_length=64)
    student, teacher = result["student"], result["teacher"]
    assert student["bits_per_byte"] > 0 and teacher["bits_per_byte"] > 0 and student["kl_per_byte"] > 0
    assert student["kl"] is None and student["agreement"] is None and "retention" not in result
    assert "bits_per_byte" in result["retained"] and not {"perplexity", "tokens_per_second"} & set(result["retained"])
    assert any("compare bits per byte" in note for note in result["notes"])


def test_blocks_of_the_student_s_tokens_are_refused_beside_such_a_teacher(pair: Path) -> None:
    with refused(ConfigError, "--blocks"):
        assess(str(pair / "student"), str(pair / "train.jsonl"), teacher=str(pair / "teacher"), blocks=True)


def test_eval_says_what_is_comparable(pair: Path) -> None:
    from typer.testing import CliRunner

    from stillroom.cli import app

    arguments = [
        "--model",
        str(pair / "student"),
        "--data",
        str(pair / "train.jsonl"),
        "--teacher",
        str(pair / "teacher"),
    ]
    shown = CliRunner().invoke(app, ["eval", *arguments, "--max-batches", "2"])
    assert shown.exit_code == 0, shown.output
    assert "KL, bits/byte" in shown.output and "retention" not in shown.output


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def test_eight_micro_batches_equal_one(pair: Path, tmp_path: Path) -> None:
    student = save(tmp_path / "student", "llama", pair_tokenizers.built("byte-level"), num_layers=1)  # without dropout
    shared = {"student__model": str(student), "data__packing": "rows", "train__max_steps": 2}
    run(pair, tmp_path / "one", train__batch_size=8, **shared)
    run(pair, tmp_path / "eight", train__batch_size=1, train__gradient_accumulation_steps=8, **shared)
    for one, eight in zip(steps_of(tmp_path / "one"), steps_of(tmp_path / "eight"), strict=True):
        assert eight["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        assert eight["terms"]["alm"]["raw"] == pytest.approx(one["terms"]["alm"]["raw"], rel=1e-5)


def test_a_teacher_that_is_not_finite_for_a_step_leaves_the_labels(pair: Path, tmp_path: Path) -> None:
    config = load_config(preset="cross-tokenizer", overrides=tiny.settings(pair, train__max_steps=3))
    assert distill(config, tmp_path / "run", device="cpu", inject="teacher_nan@2").summary["status"] == "done"
    first, second, third = steps_of(tmp_path / "run")
    assert first["bad_teacher_rows"] == third["bad_teacher_rows"] == 0 < second["bad_teacher_rows"]
    assert second["terms"]["alm"]["raw"] == second["terms"]["prefix_match"]["raw"] == 0.0 < second["terms"]["ce"]["raw"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "student" / "model.safetensors")


@pytest.mark.parametrize(("precision", "stops_after"), [("fp32", 4), ("fp16-split", 1)])
def test_a_run_resumed_after_any_step_equals_a_whole_one(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, stops_after: int
) -> None:
    """N steps are k and N - k of them, with every objective on spans and a projector."""
    over = {
        "precision__mode": precision, "train__max_steps": 6, "train__eval_steps": 2, "objectives__uld__weight": 0.1,
        "objectives__exact_match__weight": 0.2, "objectives__span_hidden__weight": 0.1,
    }  # fmt: skip
    run(pair, tmp_path / "whole", **over)
    asked = 0

    def is_wanted(self: Stop) -> bool:
        nonlocal asked
        asked += 1
        self.reason = "test" if asked > stops_after else ""
        return bool(self.reason)

    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", is_wanted)
        with pytest.raises(Interrupted):
            run(pair, tmp_path / "parts", **over)
    assert 0 < len(steps_of(tmp_path / "parts")) < 6
    resume(tmp_path / "parts", device="cpu")
    for name, tensor in weights_of(tmp_path / "whole").items():
        assert torch.equal(tensor, weights_of(tmp_path / "parts")[name]), name
    told = [[(one["train_loss"], one["terms"]) for one in steps_of(tmp_path / name)] for name in ("whole", "parts")]
    assert told[0] == told[1]


def test_a_curriculum_moves_the_weights_of_objectives_on_spans(pair: Path, tmp_path: Path) -> None:
    ramp = {"start": 0.0, "end": 1.0}
    over = {"objectives__alm__weight": ramp, "objectives__exact_match__weight": 0.2, "train__max_steps": 5}
    run(pair, tmp_path / "run", train__eval_steps=5, **over)
    found = steps_of(tmp_path / "run")
    weights = [step["terms"].get("alm", {"weight": 0.0})["weight"] for step in found]
    assert weights == sorted(weights) and weights[0] < weights[-1]
    for step in found[1:]:
        for name in ("alm", "prefix_match", "exact_match", "ce"):
            term = step["terms"][name]
            assert term["scaled"] == pytest.approx(term["raw"] * term["weight"]) and 0.0 <= term["share"] <= 1.0
    evaluation = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "eval"][-1]
    assert set(evaluation["terms"]) == {"alm", "prefix_match", "exact_match", "ce"}


def test_the_guard_judges_the_terms_of_objectives_on_spans(pair: Path, tmp_path: Path) -> None:
    """Answers that are garbage are finite: the guard sees the terms they spoil, and the run ends well."""
    seen: list[Evidence] = []
    judge = Guard.judge

    def watching(self: Guard, evidence: Evidence) -> Verdict:
        seen.append(evidence)
        return judge(self, evidence)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "judge", watching)
        run(pair, tmp_path / "run", objectives__exact_match__weight=0.2, objectives__uld__weight=0.1)
    assert len(seen) == 3
    assert all({"ce", "alm", "prefix_match", "exact_match", "uld"} <= set(evidence.terms) for evidence in seen)


def test_a_teacher_s_error_of_quantisation_is_measured_on_its_own_rows(pair: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    summary = run(pair, tmp_path / "run", teacher__quantisation="int8", teacher__max_quantisation_kl=5.0).summary
    assert summary["status"] == "done"
    assert any(event["event"] == "teacher_quantised" for event in read_events(tmp_path / "run" / "events.jsonl"))
