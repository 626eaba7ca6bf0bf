"""Laws of the distances between insides, against float64 references written out by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stillroom.config.schema import LayerMap
from stillroom.core.errors import ConfigError
from stillroom.losses.hidden import (
    at_positions,
    attention_distance,
    cosine_distance,
    head_map,
    info_nce,
    pooled,
    relative_error,
    resolve_pairs,
)

SEEDS = st.integers(0, 9999)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def maps(seed: int, heads: int, length: int, rows: int = 2) -> Tensor:
    """Causal attention maps [B, H, L, L]."""
    scores = 2 * draw(seed, rows, heads, length, length)
    return scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf).softmax(-1)


# -- references ------------------------------------------------------------------------------------------


@given(SEEDS)
def test_relative_error_is_the_unexplained_share_of_the_teacher(seed: int) -> None:
    student, teacher = draw(seed, 5, 7), draw(seed + 1, 5, 7)
    expected = [
        sum((float(s) - float(t)) ** 2 for s, t in zip(a, b, strict=True)) / sum(float(t) ** 2 for t in b)
        for a, b in zip(student, teacher, strict=True)
    ]
    torch.testing.assert_close(relative_error(student, teacher).values, torch.tensor(expected, dtype=torch.float64))


@given(SEEDS)
def test_cosine_distance_is_one_minus_the_cosine(seed: int) -> None:
    student, teacher = draw(seed, 5, 7), draw(seed + 1, 5, 7)
    expected = 1 - torch.nn.functional.cosine_similarity(student, teacher)
    torch.testing.assert_close(cosine_distance(student, teacher).values, expected)


@given(SEEDS, st.sampled_from([(2, 2), (2, 4), (3, 4), (4, 2), (2, 3)]))
def test_attention_distance_compares_heads_at_the_same_place(seed: int, heads: tuple[int, int]) -> None:
    student, teacher = maps(seed, heads[0], 5), maps(seed + 1, heads[1], 5)
    rows = torch.tensor([1, 4, 7])
    values = attention_distance(student, teacher, rows).values
    mapping = head_map(*heads).double()
    for place, row in enumerate(rows.tolist()):
        b, query = divmod(row, 5)
        expected = 0.0
        for head in range(heads[0]):
            goal = sum(float(mapping[head, other]) * teacher[b, other, query] for other in range(heads[1]))
            expected += float((student[b, head, query] - goal).square().sum()) / heads[0]
        assert math.isclose(float(values[place]), expected, rel_tol=1e-6)


@given(SEEDS, st.floats(0.05, 2.0))
def test_info_nce_is_the_cross_entropy_of_finding_ones_own_row(seed: int, temperature: float) -> None:
    student, teacher = draw(seed, 4, 6), draw(seed + 1, 4, 6)
    is_row = torch.tensor([True, True, False, True])
    values = info_nce(student, teacher, is_row, temperature).values
    kept = [0, 1, 3]
    for i in range(4):
        if i not in kept:
            assert values[i] == 0
            continue
        cosines = [torch.nn.functional.cosine_similarity(student[i], teacher[j], dim=0) / temperature for j in kept]
        expected = -torch.log_softmax(torch.stack(cosines), 0)[kept.index(i)]
        torch.testing.assert_close(values[i], expected)


def test_pooling_is_the_mean_over_scored_positions() -> None:
    states = draw(0, 3, 4, 2)
    means, is_row = pooled(states, torch.tensor([1, 2, 8]))
    torch.testing.assert_close(means[0], states[0, 1:3].mean(0))
    torch.testing.assert_close(means[2], states[2, 0])
    assert is_row.tolist() == [True, False, True]


# -- zero, bounds and scale ------------------------------------------------------------------------------


@given(SEEDS)
def test_equal_insides_have_no_distance_and_others_have(seed: int) -> None:
    states, other = draw(seed, 4, 6), draw(seed + 1, 4, 6)
    assert (relative_error(states, states).values == 0).all()
    assert (relative_error(other, states).values > 0).all()
    assert cosine_distance(3 * states, states).values.abs().max() < 1e-14, "direction alone counts"
    assert (cosine_distance(other, states).values > 1e-9).all()
    rows = torch.arange(1, 5)
    a, b = maps(seed, 2, 5), maps(seed + 1, 2, 5)
    assert (attention_distance(a, a, rows).values == 0).all()
    assert (attention_distance(b, a, rows).values > 0).all()


@given(SEEDS, st.floats(1e-3, 1e3), st.integers(1, 4))
def test_the_scale_depends_neither_on_width_nor_on_the_size_of_activations(seed: int, size: float, copies: int) -> None:
    student, teacher = draw(seed, 5, 7), draw(seed + 1, 5, 7)
    for distance in (relative_error, cosine_distance):
        plain = distance(student, teacher).values
        torch.testing.assert_close(distance(size * student, size * teacher).values, plain)
        torch.testing.assert_close(distance(student.repeat(1, copies), teacher.repeat(1, copies)).values, plain)


@given(SEEDS)
def test_attention_distance_lies_between_0_and_2(seed: int) -> None:
    values = attention_distance(maps(seed, 2, 6), maps(seed + 1, 3, 6), torch.arange(12)).values
    assert (values >= 0).all() and (values <= 2).all()


@given(st.integers(1, 12), st.integers(1, 12))
def test_every_head_looks_at_a_distribution_over_the_teachers_heads(student: int, teacher: int) -> None:
    weights = head_map(student, teacher)
    torch.testing.assert_close(weights.sum(1), torch.ones(student))
    assert (weights.sum(0) > 0).all(), "no head of the teacher is left out"
    if student == teacher:
        assert torch.equal(weights, torch.eye(student))


def test_one_row_has_nothing_to_be_told_from() -> None:
    alone = torch.tensor([False, True, False])
    assert info_nce(draw(0, 1, 4), draw(1, 1, 4), torch.tensor([True]), 0.1).values.tolist() == [0.0]
    assert info_nce(draw(0, 3, 4), draw(1, 3, 4), alone, 0.1).values.tolist() == [0.0, 0.0, 0.0]


# -- gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", [relative_error, cosine_distance])
def test_gradients_of_states_hold_against_finite_differences(distance: object) -> None:
    student = draw(3, 4, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: distance(s, draw(4, 4, 5)).values, (student,))  # type: ignore[operator]


def test_gradients_of_attention_and_contrast_hold_against_finite_differences() -> None:
    probs = maps(5, 2, 4).requires_grad_()
    rows = torch.tensor([0, 3, 6])
    assert torch.autograd.gradcheck(lambda p: attention_distance(p, maps(6, 4, 4), rows).values, (probs,))
    states = draw(7, 3, 4, 5).requires_grad_()
    rows = torch.tensor([0, 1, 5, 9, 10])

    def contrast(s: Tensor) -> Tensor:
        means, is_row = pooled(s, rows)
        return info_nce(means, draw(8, 3, 5), is_row, 0.3).values

    assert torch.autograd.gradcheck(contrast, (states,))


# -- half precision, and teachers that break -------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 300.0, 6e4])
def test_fp16_activations_give_what_float64_gives(size: float) -> None:
    """At 6e4 a square is infinite in FP16, and so is a sum."""
    student = (size * draw(0, 2, 8, 64).clamp(-1, 1)).half()
    teacher = (size * draw(1, 2, 8, 64).clamp(-1, 1)).half()
    rows = torch.arange(16)
    for distance in (relative_error, cosine_distance):
        found = distance(at_positions(student, rows), at_positions(teacher, rows)).values
        expected = distance(at_positions(student.double(), rows), at_positions(teacher.double(), rows)).values
        assert found.dtype == torch.float32
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0)
    means = [pooled(states, rows)[0] for states in (student, teacher, student.double(), teacher.double())]
    is_row = torch.ones(2, dtype=torch.bool)
    found = info_nce(means[0], means[1], is_row, 0.1).values
    torch.testing.assert_close(found.double(), info_nce(means[2], means[3], is_row, 0.1).values, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0])
def test_a_state_the_teacher_spoiled_is_left_out_counted_and_without_gradient(bad: float) -> None:
    student, teacher = draw(0, 4, 5).requires_grad_(), draw(1, 4, 5)
    teacher[2] = bad
    for distance in (relative_error, cosine_distance):
        found = distance(student, teacher)
        (gradient,) = torch.autograd.grad(found.values.sum(), student)
        assert found.is_bad.tolist() == [False, False, True, False] and found.values[2] == 0
        assert (gradient[2] == 0).all() and torch.isfinite(gradient).all() and (gradient[3] != 0).any()
    found = info_nce(student, teacher, torch.ones(4, dtype=torch.bool), 0.2)
    (gradient,) = torch.autograd.grad(found.values.sum(), student)
    assert found.is_bad.tolist() == [False, False, True, False] and (gradient[2] == 0).all()
    assert torch.isfinite(gradient).all()


def test_attention_maps_the_teacher_spoiled_are_left_out() -> None:
    student, teacher = maps(0, 2, 4).requires_grad_(), maps(1, 2, 4)
    teacher[0, 1, 2] = math.nan
    found = attention_distance(student, teacher, torch.arange(8))
    (gradient,) = torch.autograd.grad(found.values.sum(), student)
    assert found.is_bad.nonzero().tolist() == [[2]] and torch.isfinite(gradient).all()


def test_a_student_s_zero_state_is_at_distance_one_without_gradient() -> None:
    student = torch.zeros(1, 4, requires_grad=True)
    found = cosine_distance(student, torch.ones(1, 4)).values
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert found.tolist() == [1.0] and (gradient == 0).all()


# -- layer maps ------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 80))
def test_the_proportional_map_is_monotone_and_ends_at_the_last_layer(student: int, teacher: int) -> None:
    pairs = resolve_pairs("proportional", student, teacher, where="x")
    goals = [goal for _mine, goal in pairs]
    assert [mine for mine, _goal in pairs] == list(range(student))
    assert goals == sorted(goals) and goals[-1] == teacher - 1 and goals[0] >= 0
    if student == teacher:
        assert goals == list(range(teacher))
    if teacher % student == 0:
        assert len({b - a for a, b in itertools.pairwise(goals)}) <= 1, "equal steps"


def test_pairs_may_be_counted_from_the_end() -> None:
    assert resolve_pairs(((0, 0), (-1, -2)), 3, 8, where="x") == ((0, 0), (2, 6))
    assert resolve_pairs("last", 3, 8, where="x") == ((2, 7),)


def test_a_student_cut_from_the_teacher_is_compared_with_the_layers_it_once_was() -> None:
    assert resolve_pairs("proportional", 3, 8, where="x", kept=(0, 4, 7)) == ((0, 0), (1, 4), (2, 7))


@pytest.mark.parametrize("pairs", [((3, 0),), ((0, 8),), ((-4, 0),), ()])
def test_a_layer_that_does_not_exist_is_refused_with_the_range(pairs: LayerMap) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_pairs(pairs, 3, 8, where="objectives.feature.layers")
    assert caught.value.advice and caught.value.where == "objectives.feature.layers"
