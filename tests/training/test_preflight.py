"""Laws of the first forward: a misaligned pair is found before hours are spent on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillroom.config import load_config
from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.core.types import IGNORED, Batch, HeadWeights
from stillroom.data.loader import Loader
from stillroom.models.anatomy import backbone, head_of
from stillroom.telemetry import read_events
from stillroom.telemetry.wording import component_lines, first_forward_lines
from stillroom.training.distill import distill
from stillroom.training.preflight import SHIFTS, check_targets, first_forward, judge_alignment, shifted_losses
from stillroom.training.run import RunState


def batch_of(ids: torch.Tensor) -> Batch:
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = ids[:, 1:]
    return Batch(ids, torch.ones_like(ids), targets, torch.ones_like(ids), tuple(map(str, range(len(ids)))))


def text_batch(rows: int = 8) -> Batch:
    words = tiny.tokenizer()
    lines = [words(line)["input_ids"] for line in tiny.sentences(200, 5)]
    return batch_of(torch.tensor([line[:16] for line in lines if len(line) >= 16][:rows]))


def judged(path: Path, batch: Batch) -> tuple[dict[str, float], str]:
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        hidden = backbone(model)(input_ids=batch.input_ids).last_hidden_state
        chosen = hidden.reshape(-1, hidden.shape[-1])[batch.positions]
        return judge_alignment(shifted_losses(chosen, head_of(model), batch))


def shifted(batch: Batch, by: int) -> Batch:
    """The same batch with targets that lie `by` positions further on."""
    targets = torch.full_like(batch.targets, IGNORED)
    if by > 0:
        targets[:, :-by] = batch.targets[:, by:]
    else:
        targets = torch.where(batch.targets != IGNORED, batch.input_ids, IGNORED)
    return replace(batch, targets=targets)


def test_a_trained_model_finds_the_right_alignment_best(world: Path) -> None:
    found, doubt = judged(world / "teacher", text_batch())
    assert doubt == ""
    assert found["as_given"] < min(found["one_back"], found["one_ahead"])


def test_labels_that_were_never_shifted_score_better_one_ahead(world: Path) -> None:
    found, doubt = judged(world / "teacher", shifted(text_batch(), -1))
    assert doubt == "one_ahead"
    assert found["one_ahead"] < found["as_given"]


@pytest.mark.parametrize("by", [-1, 1])
def test_misaligned_targets_are_found_by_content(by: int) -> None:
    check_targets(text_batch())
    with refused(BrokenAtStart, "first batch") as caught:
        check_targets(shifted(text_batch(), by))
    assert caught.value.exit_code == 20 and caught.value.advice


@pytest.mark.parametrize("seed", range(5))
def test_a_random_model_is_in_doubt_and_not_an_error(tmp_path: Path, seed: int) -> None:
    tiny.save_model(tmp_path / "random", "llama", seed=seed)
    assert judged(tmp_path / "random", text_batch())[1] == "noise"


def test_a_random_model_with_tied_embeddings_prefers_its_own_input(tmp_path: Path) -> None:
    tiny.save_model(tmp_path / "tied", "gpt2", seed=0)
    assert judged(tmp_path / "tied", text_batch())[1] in ("one_back", "noise")


def test_a_model_that_repeats_its_input_is_not_refused_on_text_that_goes_to_and_fro() -> None:
    """It finds the token after the target where that is its input again, and finds its input more often."""
    batch = batch_of(torch.tensor([[3, 5, 3, 6, 3, 1, 4, 1] * 4, [7, 2, 7, 2, 0, 4, 6, 4] * 4]))
    table = 4.0 * torch.eye(8)
    losses = shifted_losses(table[batch.input_ids].reshape(-1, 8)[batch.positions], HeadWeights(table), batch)
    found, doubt = judge_alignment(losses)
    assert found["one_back"] < found["one_ahead"] < found["as_given"] and doubt == "one_back"


def test_too_few_positions_say_nothing() -> None:
    assert judge_alignment(torch.zeros(3, 0))[1] == "unknown"
    assert judge_alignment(torch.rand(3, 5))[1] == "unknown"


def test_a_run_with_shifted_labels_stops_with_exit_code_20(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Loader.window
    monkeypatch.setattr(Loader, "window", lambda self, index: [shifted(batch, 1) for batch in original(self, index)])
    with refused(BrokenAtStart, "first batch") as caught:
        distill(load_config(overrides=tiny.settings(world)), tmp_path / "run", device="cpu")
    assert caught.value.exit_code == 20


@pytest.mark.parametrize("declared", ["none", "top-k", "sampled"])
def test_a_teacher_whose_answer_is_not_of_its_declared_kind_is_refused_by_name(make_run: Any, declared: str) -> None:
    run = make_run()
    first_forward(run, RunState())
    run.teacher.kind = declared
    with refused(BrokenAtStart, "", "LiveTeacher", repr(declared), "'dense'") as caught:
        first_forward(run, RunState())
    assert caught.value.exit_code == 20 and caught.value.advice and caught.value.where == run.config.teacher.model


def test_a_run_without_a_teacher_passes_the_check_of_the_kind(make_run: Any) -> None:
    run = make_run(objectives__kd__weight=0.0, objectives__ce__weight=1.0)
    assert run.teacher.kind == "none"
    first_forward(run, RunState())


def test_the_first_forward_says_shapes_vocabularies_and_alignment(world: Path, tmp_path: Path) -> None:
    config = load_config(overrides=tiny.settings(world, train__max_steps=1))
    result = distill(config, tmp_path / "run", device="cpu")
    (event,) = [e for e in read_events(result.folder / "events.jsonl") if e["event"] == "first_forward"]
    assert event["student_logits"] == event["teacher_logits"] == [event["scored"], tiny.VOCAB]
    assert event["vocabulary_hash"]["student"] == event["vocabulary_hash"]["teacher"]
    assert event["alignment"]["as_given"] < min(event["alignment"][name] for name in SHIFTS[1:])
    lines = first_forward_lines(event)
    assert any("the same" in line for line in lines) and any("as given" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_vocabularies_of_one_size_and_other_content_are_refused_with_both_hashes(world: Path, tmp_path: Path) -> None:
    other = tiny.save_model(tmp_path / "other", "llama", width=32, num_layers=1)
    saved = json.loads((other / "tokenizer.json").read_text())
    vocab = saved["model"]["vocab"]
    a, b = list(vocab)[-2:]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (other / "tokenizer.json").write_text(json.dumps(saved))
    assert len(AutoTokenizer.from_pretrained(other).get_vocab()) == tiny.VOCAB
    config = load_config(overrides=tiny.settings(world, student__model=str(other)))
    with pytest.raises(
        ConfigError, match=r"hashes [0-9a-f]{16} and [0-9a-f]{16}.*2 of them under another id"
    ) as caught:
        distill(config, tmp_path / "run", device="cpu")
    assert caught.value.advice


def test_the_first_steps_show_each_component_their_sum_and_the_squared_temperature() -> None:
    terms: dict[str, Any] = {
        "kd": {"raw": 2.345678, "weight": 0.5, "scaled": 1.172839, "share": 0.339},
        "ce": {"raw": 4.56789, "weight": 0.5, "scaled": 2.283945, "share": 0.661},
    }
    lines = component_lines({"step": 1, "train_loss": 3.456784, "terms": terms}, 3.0)
    assert lines == [
        "  term         raw    weight      scaled   share",
        "  kd         2.346       0.5       1.173   33.9%",
        "  ce         4.568       0.5       2.284   66.1%",
        "  sum                              3.457",
        "  temperature 3  squared 9, part of raw kd",
    ]
