"""Laws of the yardsticks: ratios of sums, bounded by theory, with intervals over documents."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from stillroom.config.schema import DataConfig
from stillroom.core.types import IGNORED
from stillroom.data import fixed_batches, open_eval
from stillroom.metrics.metrics import AGAINST_TEACHER, COLUMNS, MIN_DOCUMENTS, NUM_BINS, NUM_COLUMNS, Ledger, ratios
from stillroom.models import Student
from stillroom.precision import resolve
from stillroom.teachers import LiveTeacher
from stillroom.training.evaluate import Evaluation, evaluate

CPU = torch.device("cpu")
PLACE = {name: index for index, name in enumerate(COLUMNS)}


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path)


def rows_of(world: Path, **over: Any) -> Any:
    config = DataConfig(train="-", max_length=32, **over)
    return open_eval(str(world / "train.jsonl"), tiny.tokenizer(), config).evaluation


def measured(world: Path, batch_size: int = 8, model: str = "student", *, alone: bool = False) -> Evaluation:
    source = LiveTeacher(load(world / "teacher"), vocab_size=tiny.VOCAB, device=CPU, offload=False, is_described=True)
    student = Student(load(world / model), vocab_size=tiny.VOCAB, is_described=True)
    batches = fixed_batches(rows_of(world), batch_size, 24 // batch_size)
    return evaluate(student, batches, precision=resolve("fp32", CPU), teacher=None if alone else source)


def test_yardsticks_equal_their_definitions_in_float64(world: Path) -> None:
    found = measured(world).ledger.values()
    student, teacher = load(world / "student"), load(world / "teacher")
    log_q, log_p, targets, sizes = [], [], [], 0
    for batch in fixed_batches(rows_of(world), 8, 3):
        scored = batch.targets != IGNORED
        with torch.no_grad():
            log_q.append(student(batch.input_ids).logits[scored].double().log_softmax(-1))
            log_p.append(teacher(batch.input_ids).logits[scored].double().log_softmax(-1))
        targets.append(batch.targets[scored])
        sizes += int(batch.target_bytes.sum())
    q, p, y = torch.cat(log_q), torch.cat(log_p), torch.cat(targets)
    nll = -q[torch.arange(len(y)), y]
    top_q, top_p = q.topk(5).indices, p.topk(5).indices
    confidence, chosen = q.exp().max(-1)
    expected_gap = 0.0
    for number in range(NUM_BINS):
        inside = (confidence > number / NUM_BINS) & (confidence <= (number + 1) / NUM_BINS)
        if inside.any():
            expected_gap += abs(float((chosen == y)[inside].double().mean() - confidence[inside].mean())) * float(
                inside.double().mean()
            )
    shared = torch.tensor([len(set(a) & set(b)) / 5 for a, b in zip(top_q.tolist(), top_p.tolist(), strict=True)])
    expected = {
        "perplexity": math.exp(nll.mean()),
        "bits_per_byte": float(nll.sum()) / math.log(2) / sizes,
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
        "agreement": float((q.argmax(-1) == p.argmax(-1)).double().mean()),
        "top5_agreement": float((top_q == p.argmax(-1, keepdim=True)).any(-1).double().mean()),
        "top5_overlap": float(shared.mean()),
        "acceptance": 1.0 - float((p.exp() - q.exp()).abs().sum(-1).mean()) / 2,
        "calibration_error": expected_gap,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name


def test_a_model_is_its_own_best_pupil(world: Path) -> None:
    found = measured(world, model="teacher").ledger.values()
    assert found["kl"] == pytest.approx(0.0, abs=1e-6)
    for name in ("agreement", "top5_agreement", "top5_overlap", "acceptance"):
        assert found[name] == pytest.approx(1.0, abs=1e-5), name


def test_batches_of_any_size_give_the_same_yardsticks_and_intervals(world: Path) -> None:
    one, many = measured(world, 24), measured(world, 3)
    for name, value in one.ledger.values().items():
        assert many.ledger.values()[name] == pytest.approx(value, rel=1e-5), name
    for name, bounds in one.ledger.intervals().items():
        assert many.ledger.intervals()[name] == pytest.approx(bounds, rel=1e-4, abs=1e-6), name


def test_intervals_hold_the_value_and_are_the_same_every_time(world: Path) -> None:
    found = measured(world)
    intervals = found.ledger.intervals()
    assert set(intervals) == set(found.ledger.values())
    assert intervals == measured(world).ledger.intervals()
    for name, (low, high) in intervals.items():
        value = found.ledger.values()[name]
        # A resample cannot make a gap smaller on average, so a calibration error may lie below its interval.
        assert value is not None and low <= high and (low <= value or name == "calibration_error") and value <= high


def test_without_a_teacher_nothing_is_said_about_one(world: Path) -> None:
    found = measured(world, alone=True)
    assert all(found.ledger.values()[name] is None for name in AGAINST_TEACHER)
    assert not AGAINST_TEACHER & set(found.ledger.intervals())
    assert found.ledger.values()["calibration_error"] is not None


def test_rows_of_one_document_are_drawn_together(world: Path) -> None:
    batch = next(fixed_batches(rows_of(world), 8))
    assert len(batch.documents) == 8 and batch.to(CPU).documents == batch.documents
    named = [name.partition("@")[0] for name in batch.sample_ids]
    assert list(batch.documents) == named and len(set(named)) < len(set(batch.sample_ids))


def test_what_cannot_be_scored_is_counted_and_enters_nothing_else(world: Path) -> None:
    model = load(world / "student")
    with torch.no_grad():
        model.get_input_embeddings().weight[int(next(fixed_batches(rows_of(world), 8)).input_ids[0, 5])] = float("nan")
    batches = list(fixed_batches(rows_of(world), 8, 3))
    found = evaluate(Student(model, vocab_size=tiny.VOCAB, is_described=True), batches, precision=resolve("fp32", CPU))
    assert found.unscored_tokens > 0
    assert found.tokens + found.unscored_tokens == sum(batch.num_scored for batch in batches)
    assert math.isfinite(found.perplexity) and math.isfinite(found.bits_per_byte)
    assert found.ledger.total("bytes") < sum(int(batch.target_bytes.sum()) for batch in batches)


def ledger_of(table: np.ndarray) -> Ledger:
    ledger = Ledger()
    ledger.add([f"document {number}" for number in range(len(table))], table)
    return ledger


def random_sums(num_documents: int, seed: int, spread: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    table = np.zeros((num_documents, NUM_COLUMNS))
    table[:, PLACE["targets"]] = 50
    table[:, PLACE["bytes"]] = 200
    table[:, PLACE["nll"]] = 50 * (2.0 + spread * rng.standard_normal(num_documents))
    return table


def test_more_documents_narrow_the_interval_as_the_root_says() -> None:
    def width(num_documents: int) -> float:
        low, high = ledger_of(random_sums(num_documents, 1, 0.5)).intervals()["bits_per_byte"]
        return high - low

    assert width(100) / width(900) == pytest.approx(3.0, rel=0.25)
    # Beyond a thousand documents they are drawn in groups, which must not change what is said.
    assert width(900) / width(3600) == pytest.approx(2.0, rel=0.25)


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_covers_the_truth_about_as_often_as_it_says(seed: int) -> None:
    covered = 0
    for trial in range(60):
        low, high = ledger_of(random_sums(80, 1000 * seed + trial, 0.5)).intervals()["bits_per_byte"]
        covered += low <= 50 * 2.0 / math.log(2) / 200 <= high
    assert 50 <= covered <= 60


@pytest.mark.parametrize("num_documents", [1, 2, MIN_DOCUMENTS - 1])
def test_few_documents_have_no_interval(num_documents: int) -> None:
    assert ledger_of(random_sums(num_documents, 0, 0.5)).intervals() == {}
    assert ledger_of(random_sums(MIN_DOCUMENTS, 0, 0.5)).intervals()


def test_an_infinite_perplexity_stays_infinite() -> None:
    table = random_sums(MIN_DOCUMENTS, 0, 0.0)
    table[:, PLACE["nll"]] = 50 * 200.0
    ledger = ledger_of(table)
    assert ledger.values()["perplexity"] == math.inf
    assert ledger.intervals()["perplexity"] == (math.inf, math.inf)


@given(scale=st.floats(0.1, 10), seed=st.integers(0, 99))
def test_ratios_do_not_care_how_much_there_is(scale: float, seed: int) -> None:
    totals = np.abs(np.random.default_rng(seed).standard_normal(NUM_COLUMNS)) + 0.1
    for name, value in ratios(totals).items():
        assert ratios(totals * scale)[name] == pytest.approx(value, rel=1e-9), name
