"""Laws of token weights, temperatures by difficulty, and of teachers that are wrong."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from head_cases import Case, batch_of, grads_of, logits_of, make_case
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from torch import Tensor

from stillroom.config.schema import KdConfig, ObjectivesConfig
from stillroom.core.errors import ConfigError
from stillroom.core.types import LossWeights, StudentView, TopKSignal
from stillroom.losses import divergences
from stillroom.losses import mix as token_weights
from stillroom.losses.head.loss import score_head
from stillroom.losses.head.rows import give_rest_to_label, keep_top_k
from stillroom.losses.head.token_stats import survey
from stillroom.losses.mix import Mix

LENGTHS = (3, 1, 6, 2, 4)  # scored positions of five sequences: masks are ragged
LESSON = LossWeights("train", {"kd": 0.9, "ce": 0.1}, {})
SETTINGS = {
    "entropy": {"token_weight": "entropy"},
    "fraction by distance": {"token_fraction": 0.5},
    "fraction by entropy": {"token_fraction": 0.4, "token_criterion": "entropy"},
    "temperature": {"token_temperature": 0.5, "temperature": 2.0},
    "all": {"token_weight": "entropy", "token_fraction": 0.7, "token_temperature": 0.5},
    "mft": {"on_wrong_teacher": "mft"},
    "label residual": {"on_wrong_teacher": "label_residual", "top_k": 4},
    "top-k": {"top_k": 4, "token_fraction": 0.5},
    **{name: {"divergence": name} for name in divergences.names()},
    "taid halfway": {"divergence": "taid", "interpolation": 0.5},
}
seeds = st.integers(0, 999)
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())


def mix_of(settings: dict[str, object]) -> Mix:
    plain = {"interpolation": 0.6} | settings if settings.get("divergence") == "taid" else settings
    return Mix(ObjectivesConfig(kd=KdConfig.model_validate({"interpolation": 1.0, **plain}), chunk_tokens=3))


def sequences(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def scored(mix: Mix, case: Case, part: slice, index: Tensor, counts: dict[str, int]) -> Tensor:
    view = StudentView(case.hidden[part], case.head, sequences=index, num_sequences=int(index.max()) + 1)
    signal = replace(case.teacher, hidden=case.teacher.hidden[part])
    score = mix.score(view, signal, batch_of(case.targets[part]), LESSON, counts)
    score.loss.backward()
    return score.loss.detach()


@every_setting
@given(seed=seeds)
def test_micro_batches_of_one_sequence_equal_one_batch(settings: dict[str, object], seed: int) -> None:
    mix, num_rows = mix_of(settings), sum(LENGTHS)
    whole, split = make_case(seed, num_rows).copy(), make_case(seed, num_rows).copy()
    counts = {"kd": num_rows, "ce": num_rows}
    one = scored(mix, whole, slice(0, num_rows), sequences(), counts)
    edges = [0, *itertools.accumulate(LENGTHS)]
    parts = [
        scored(mix, split, slice(a, b), torch.zeros(b - a, dtype=torch.long), counts)
        for a, b in itertools.pairwise(edges)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), one, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grads_of(split), grads_of(whole), rtol=1e-8, atol=1e-12)


@every_setting
def test_eval_equals_train_on_the_same_batch(settings: dict[str, object]) -> None:
    mix, case = mix_of(settings), make_case(3, sum(LENGTHS)).copy(torch.float32)
    view = StudentView(case.hidden, case.head, sequences=sequences(), num_sequences=len(LENGTHS))
    counts = {"kd": sum(LENGTHS), "ce": sum(LENGTHS)}
    trained = mix.score(view, case.teacher, case.batch, LESSON, counts)
    with torch.no_grad():
        evaluated = mix.score(view, case.teacher, case.batch, LESSON, counts)
    assert torch.equal(trained.loss.detach(), evaluated.loss)


# -- the facts -------------------------------------------------------------------------------------------


@given(seed=seeds)
def test_facts_are_entropy_and_hellinger_distance(seed: int) -> None:
    case = make_case(seed, has_bias=True, softcap=5.0)
    facts = survey(case.view, case.teacher, chunk_tokens=2)
    q, p = (
        torch.softmax(logits_of(hidden, head), -1)
        for hidden, head in ((case.hidden, case.head), (case.teacher.hidden, case.teacher.head))
    )
    torch.testing.assert_close(facts.entropy, -(q * q.log()).sum(-1))
    torch.testing.assert_close(facts.hellinger, (1 - (p * q).sqrt().sum(-1)).clamp_min(0).sqrt(), rtol=1e-6, atol=1e-7)


# -- weights and temperatures ----------------------------------------------------------------------------


@given(seed=seeds, fraction=st.floats(0.01, 1.0))
def test_weights_have_mean_one_in_each_sequence(seed: int, fraction: float) -> None:
    index = token_weights.Sequences(sequences(), len(LENGTHS))
    values = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for weights in (token_weights.entropy_weights(values, index), token_weights.top_fraction(values, index, fraction)):
        assert (weights >= 0).all()
        torch.testing.assert_close(index.mean(weights), torch.ones_like(weights))


@given(seed=seeds, fraction=st.floats(0.01, 1.0))
def test_the_chosen_positions_are_the_largest_of_their_sequence(seed: int, fraction: float) -> None:
    values = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights = token_weights.top_fraction(values, token_weights.Sequences(sequences(), len(LENGTHS)), fraction)
    for part, chosen in zip(values.split(LENGTHS), weights.split(LENGTHS), strict=True):
        num_chosen = max(1, math.ceil(len(part) * fraction - 1e-6))
        assert set(part.topk(num_chosen).indices.tolist()) == set(chosen.nonzero().flatten().tolist())


@given(seed=seeds)
def test_hard_positions_are_taught_sharply_and_the_median_as_asked(seed: int) -> None:
    index = token_weights.Sequences(sequences(), len(LENGTHS))
    distance = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.01
    temperatures = token_weights.temperatures(distance, index, 2.0, 0.5)
    median = index.median(distance)
    for part, expected in zip(distance.split(LENGTHS), median.split(LENGTHS), strict=True):
        assert (expected == part.median()).all()
    assert (temperatures[distance == median] == 2.0).all()
    assert (temperatures[distance > median] < 2.0).all()
    assert (temperatures[distance < median] > 2.0).all()
    assert ((temperatures >= 2.0 * math.exp(-0.5)) & (temperatures <= 2.0 * math.exp(0.5))).all()


def test_equal_models_give_finite_temperatures() -> None:
    index = token_weights.Sequences(torch.zeros(4, dtype=torch.long), 1)
    assert (token_weights.temperatures(torch.zeros(4), index, 1.0, 0.5) == 1.0).all()
    assert (token_weights.entropy_weights(torch.zeros(4), index) == 1.0).all()


def test_cross_entropy_is_not_weighted() -> None:
    case = make_case(0, sum(LENGTHS))
    view = StudentView(case.hidden, case.head, sequences=sequences(), num_sequences=len(LENGTHS))
    counts = {"kd": sum(LENGTHS), "ce": sum(LENGTHS)}
    uniform, chosen = (
        mix_of(settings).score(view, case.teacher, case.batch, LESSON, counts)
        for settings in ({}, {"token_fraction": 0.3})
    )
    assert torch.equal(uniform.terms["ce"].total, chosen.terms["ce"].total)
    assert not torch.equal(uniform.terms["kd"].total, chosen.terms["kd"].total)


# -- teachers that are wrong -----------------------------------------------------------------------------


@given(seed=seeds, margin=st.floats(0.05, 0.9))
def test_the_label_leads_by_the_margin_where_the_teacher_was_wrong(seed: int, margin: float) -> None:
    case = make_case(seed, 9, spread=2.0)
    teacher = torch.softmax(logits_of(case.teacher.hidden, case.teacher.head), -1)
    expected = teacher.clone()
    num_wrong = 0
    for row, target in zip(expected, case.targets.tolist(), strict=True):
        most = row.max().item()
        if row[target] < most:
            num_wrong += 1
            share = (margin + most - row[target].item()) / (1 + most - row[target].item())
            row.mul_(1 - share)
            row[target] += share
            others = row.clone()
            others[target] = 0
            assert row[target] - others.max() == pytest.approx(margin)
    student = torch.log_softmax(logits_of(case.hidden, case.head), -1)
    kd = (expected * (expected.log() - student)).sum()
    out = score_head(
        case.view, case.teacher, case.targets, kd_weight=1.0, ce_weight=0.0, divergence=divergences.make("forward_kl"),
        label_margin=margin, chunk_tokens=4,
    )  # fmt: skip
    torch.testing.assert_close(out.terms["kd"].total, kd)
    assert out.counters["corrected_rows"] == num_wrong


@given(seed=seeds)
def test_the_rest_of_a_top_k_teacher_goes_to_the_label(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 20, generator=generator, dtype=torch.float64)
    targets = torch.randint(20, (6,), generator=generator)
    kept = keep_top_k(logits, 5, torch.ones(6, dtype=torch.float64))
    given_away = give_rest_to_label(kept, targets)
    torch.testing.assert_close(given_away.log_probs.exp().sum(-1), torch.ones(6, dtype=torch.float64))
    assert (given_away.tail_log_mass == -math.inf).all()
    probs = torch.softmax(logits, -1)
    for row, target in enumerate(targets.tolist()):
        ids = given_away.ids[row].tolist()
        assert len(set(ids)) == len(ids)
        for token, log_prob in zip(ids, given_away.log_probs[row].tolist(), strict=True):
            if token != target:
                assert math.exp(log_prob) == pytest.approx(probs[row, token].item())


def test_labels_cannot_help_where_nothing_is_missing_or_not_all_is_known() -> None:
    case = make_case()
    common = {"kd_weight": 1.0, "ce_weight": 0.0, "divergence": divergences.make("forward_kl")}
    with refused(ConfigError, "", "objectives.kd.top_k"):
        score_head(case.view, case.teacher, case.targets, rest_to_label=True, **common)
    kept = keep_top_k(logits_of(case.teacher.hidden, case.teacher.head), 3, torch.ones(7, dtype=torch.float64))
    stored = TopKSignal(kept.ids, kept.log_probs, kept.tail_log_mass)
    with refused(ConfigError, "", "objectives.kd.top_k"):
        score_head(case.view, stored, case.targets, label_margin=0.2, **common)
    with refused(ConfigError, "", "objectives.kd.on_wrong_teacher"):
        score_head(case.view, case.copy(trains_teacher=True).teacher, case.targets, label_margin=0.2, **common)
    with pytest.raises(ValueError, match="whole row"):
        KdConfig(on_wrong_teacher="mft", top_k=4)
