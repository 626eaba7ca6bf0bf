"""The laws of objectives on spans."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pair_tokenizers
import paired_batches
import pytest
import torch
from refusals import refused

from stillroom.config.schema import ObjectivesConfig
from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch, DenseSignal, LossWeights, Score
from stillroom.losses.divergences import make
from stillroom.losses.head.loss import score_head
from stillroom.losses.mix import Mix, ModelDims, TokenMatch, plan_objectives
from stillroom.losses.two_tokenizers import GroupSums, SpanSlots, num_exact, num_spans
from stillroom.teachers.paired import matched_tokens
from stillroom.teachers.signals import Coarse, SharedTokens, SignalSpec, TokenGroups, reduce_row, signal_of

NAMES = ("alm", "exact_match", "prefix_match", "uld", "span_hidden")


@cache
def matched_of(pair: tuple[str, str]) -> TokenMatch:
    return matched_tokens(*map(pair_tokenizers.built, pair))


def mix_of(pair: tuple[str, str] = paired_batches.PAIR, width: int = 12, **weights: Any) -> tuple[Mix, LossWeights]:
    sections: dict[str, Any] = {
        "kd": {"weight": 0.0},
        "ce": {"weight": 0.5},
        "chunk_tokens": 7,
        **{name: value if isinstance(value, dict) else {"weight": value} for name, value in weights.items()},
    }
    config = ObjectivesConfig.model_validate(sections)
    matched = matched_of(pair)
    planned = plan_objectives(config, ModelDims(1, width), ModelDims(1, width + 4), matched=matched)
    settings = {"alm.temperature": config.alm.temperature, "kd.temperature": 1.0}
    loss_weights = LossWeights("x", {name: float(weight) for name, weight in config.weights.items()}, settings)
    return Mix(config, planned=planned), loss_weights


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    corpus = paired_batches.corpus(tmp_path_factory.mktemp("paired"), packing="rows")
    return corpus.train.batch(range(8))


def scored(batch: Batch, both: paired_batches.Heads, name: str, **setting: Any) -> Score:
    mix, loss_weights = mix_of(**{name: {"weight": 0.7, **setting}})
    if mix.projectors:
        mix.projectors.to(both.view.hidden.dtype)
    return mix.score(both.view, both.signal, batch, loss_weights, mix.counts([batch]))


def spans_by_hand(batch: Batch) -> list[tuple[int, list[int], list[int], bool]]:
    """(row, scored positions of the student, of the teacher, is exact) of each span, with plain loops."""
    assert batch.spans is not None and batch.other is not None and batch.other.spans is not None
    found: dict[tuple[int, int], tuple[list[int], list[int], bool]] = {}
    for side, own in enumerate((batch, batch.other)):
        width = own.input_ids.shape[1]
        assert own.spans is not None
        for number, place in enumerate(own.positions.tolist()):
            span = int(own.spans.reshape(-1)[place])
            if span >= 0:
                exact = bool(batch.is_exact.reshape(-1)[place]) if side == 0 else False  # type: ignore[union-attr]
                entry = found.setdefault((place // width, span), ([], [], exact))
                entry[side].append(number)
    return [(row, *entry) for (row, _), entry in sorted(found.items())]


def reference(batch: Batch, both: paired_batches.Heads, name: str) -> torch.Tensor:
    """The sum of a term in float64, span by span."""
    assert batch.other is not None
    view, signal = both.view, both.signal
    ours = torch.log_softmax(view.hidden.double() @ view.head.weight.double().T, -1)
    theirs = torch.log_softmax(signal.hidden.double() @ signal.head.weight.double().T, -1)
    matched = matched_of(paired_batches.PAIR)
    total = torch.zeros((), dtype=torch.float64)
    for _row, students, teachers, is_exact in spans_by_hand(batch):
        q = sum(ours[n, batch.scored_targets[n]] for n in students)
        p = sum(theirs[m, batch.other.scored_targets[m]] for m in teachers)
        if name == "alm":
            p, q = (torch.exp((one - 1e-6) / 100) for one in (p, q))  # type: ignore[arg-type]
            total = total + 100 * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log())
        elif name == "exact_match" and is_exact:
            p, q = theirs[teachers[0]].exp(), ours[students[0]].exp()
            pairs = [(p[matched.teacher_ids], q[matched.student_ids])]
            pairs.append((1 - pairs[0][0].sum()[None], 1 - pairs[0][1].sum()[None]))
            total = total + sum((a * (a / b).log()).sum() for a, b in pairs)
        elif name == "prefix_match":
            p, q = theirs[teachers[0]].exp(), ours[students[0]].exp()
            masses = [[0.0] * matched.num_groups for _ in range(2)]
            for side, (given, groups) in enumerate(((p, matched.teacher_groups), (q, matched.student_groups))):
                for token, group in enumerate(groups):
                    masses[side][group] = masses[side][group] + given[token]
            total = total + sum(a * (a / b).log() for a, b in zip(*masses, strict=True))  # type: ignore[attr-defined]
        elif name == "uld":
            p, q = (one.exp().sort(descending=True).values for one in (theirs[teachers[0]], ours[students[0]]))
            size = max(len(p), len(q))
            p, q = (torch.cat([one, one.new_zeros(size - len(one))]) for one in (p, q))
            total = total + (p - q).abs().sum()
    return total


@pytest.mark.parametrize("name", ["alm", "exact_match", "prefix_match", "uld"])
def test_a_term_is_the_float64_sum_over_spans(batch: Batch, name: str) -> None:
    both = paired_batches.heads(batch, dtype=torch.float64)
    term = scored(batch, both, name).terms[name]
    assert float(term.total) == pytest.approx(float(reference(batch, both, name).detach()), rel=1e-9)
    assert int(term.count) == (num_exact([batch]) if name == "exact_match" else num_spans([batch]))


@pytest.mark.parametrize("name", ["alm", "exact_match", "prefix_match", "uld"])
def test_gradients_are_those_of_the_float64_reference(batch: Batch, name: str) -> None:
    both = paired_batches.heads(batch, dtype=torch.float64)
    score = scored(batch, both, name)
    inputs = [both.view.hidden, both.view.head.weight]
    mix, loss_weights = mix_of()
    plain = mix.score(both.view, both.signal, batch, loss_weights, mix.counts([batch]))
    mine = torch.autograd.grad(score.loss - plain.loss, inputs)
    count = num_exact([batch]) if name == "exact_match" else num_spans([batch])
    right = torch.autograd.grad(0.7 / count * reference(batch, both, name), inputs)
    for one, other in zip(mine, right, strict=True):
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_differences(batch: Batch, name: str) -> None:
    both = paired_batches.heads(batch, dtype=torch.float64)
    leaf = both.view.taps["hidden.0"] if name == "span_hidden" else both.view.hidden
    (gradient,) = torch.autograd.grad(scored(batch, both, name).loss, leaf, allow_unused=False)
    direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(step: float) -> float:
        moved = leaf.detach() + step * direction
        view = (
            replace(both.view, taps={"hidden.0": moved}) if name == "span_hidden" else replace(both.view, hidden=moved)
        )
        return float(scored(batch, paired_batches.Heads(view, both.signal), name).loss.detach())

    step = 1e-6
    slope = (loss(step) - loss(-step)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_eight_rows_at_once_are_eight_of_one_row(batch: Batch, name: str) -> None:
    both = paired_batches.heads(batch, dtype=torch.float64)
    mix, loss_weights = mix_of(**{name: 0.7})
    mix.projectors.to(torch.float64)
    counts = mix.counts([batch])
    whole = mix.score(both.view, both.signal, batch, loss_weights, counts)
    parts = list(batch.parts(8))
    assert len(parts) == 8
    scores = []
    for number, part in enumerate(parts):
        own = both.rows(batch, slice(number, number + 1))
        scores.append(mix.score(own.view, own.signal, part, loss_weights, counts))
    assert float(sum(score.loss for score in scores)) == pytest.approx(float(whole.loss), rel=1e-10)
    assert sum(mix.counts([part])[name] for part in parts) == counts[name]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_in_no_span_does_not_matter(batch: Batch, name: str) -> None:
    """Other states where no span is, on both sides, and other padding: the term is the same."""
    both = paired_batches.heads(batch)
    slots = SpanSlots.of(batch)
    is_free, is_told_free = slots.student == slots.num_slots, slots.teacher == slots.num_slots
    assert batch.spans is not None and batch.other is not None and batch.other.spans is not None
    hidden = torch.where(is_free[:, None], 9.0, both.view.hidden.detach())
    told = torch.where(is_told_free[:, None], math.nan, both.signal.hidden)
    taps = {"hidden.0": torch.where((batch.spans < 0)[..., None], 9.0, both.view.taps["hidden.0"].detach())}
    told_taps = {"hidden.0": torch.where((batch.other.spans < 0)[..., None], 9.0, both.signal.taps["hidden.0"])}
    changed = paired_batches.Heads(
        replace(both.view, hidden=hidden, taps=taps), replace(both.signal, hidden=told, taps=told_taps)
    )
    one, other = (scored(batch, side, name).terms[name] for side in (both, changed))
    assert torch.equal(one.total, other.total) and torch.equal(one.count, other.count)


@pytest.mark.parametrize("name", NAMES)
def test_a_teacher_that_is_not_finite_is_left_out_and_counted(batch: Batch, name: str) -> None:
    both = paired_batches.heads(batch)
    slots = SpanSlots.of(batch)
    _, theirs = slots.first_positions(slots.is_exact)
    hidden, taps = both.signal.hidden.clone(), both.signal.taps["hidden.0"].clone()
    hidden[theirs[0]] = math.nan
    assert batch.other is not None
    taps.reshape(-1, taps.shape[-1])[batch.other.positions[theirs[0]]] = math.nan
    spoiled = replace(both.signal, hidden=hidden, taps={"hidden.0": taps})
    score = scored(batch, paired_batches.Heads(both.view, spoiled), name)
    assert int(score.counters["bad_teacher_rows"]) == 1 and math.isfinite(float(score.loss))
    score.loss.backward()
    assert torch.isfinite(both.view.hidden.grad).all()  # type: ignore[arg-type]
    assert int(score.terms[name].count) == int(scored(batch, both, name).terms[name].count) - 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_give_finite_fp32_terms_and_gradients(batch: Batch, name: str, dtype: torch.dtype) -> None:
    both = paired_batches.heads(batch, dtype=dtype)
    mix, loss_weights = mix_of(**{name: 0.7})
    score = mix.score(both.view, both.signal, batch, loss_weights, mix.counts([batch]))
    assert score.terms[name].total.dtype == torch.float32 and torch.isfinite(score.terms[name].total)
    score.loss.backward()
    gradient = (both.view.taps["hidden.0"] if name == "span_hidden" else both.view.hidden).grad
    assert gradient is not None and gradient.dtype == dtype and torch.isfinite(gradient).all()


def test_equal_likelihoods_have_no_divergence_and_no_gradient(tmp_path: Path) -> None:
    """The same tokenizer and the same states on both sides: alm, exact_match and prefix_match are 0."""
    pair = ("byte-level", "byte-level")
    batch = paired_batches.corpus(tmp_path, *pair, packing="rows").train.batch(range(4))
    both = paired_batches.heads(batch, pair=pair)
    same = replace(both.signal, hidden=both.view.hidden.detach(), head=replace(both.view.head))
    mix, loss_weights = mix_of(pair, alm=1.0, exact_match=1.0, prefix_match=1.0, ce={"weight": 0.0}, kd={"weight": 0.0})
    score = mix.score(both.view, same, batch, loss_weights, mix.counts([batch]))
    assert all(abs(float(score.terms[name].mean)) < 1e-5 for name in ("alm", "exact_match", "prefix_match"))
    score.loss.backward()
    assert both.view.hidden.grad is not None and float(both.view.hidden.grad.abs().max()) < 1e-6


@pytest.mark.parametrize("name", ["exact_match", "prefix_match"])
def test_with_one_tokenizer_a_match_is_the_forward_kl_of_every_target(tmp_path: Path, name: str) -> None:
    pair = ("byte-level", "byte-level")
    corpus = paired_batches.corpus(tmp_path, *pair, packing="rows")
    assert corpus.coverage is not None and corpus.coverage.share == corpus.coverage.one_to_one_share == 1.0
    batch = corpus.train.batch(range(6))
    assert batch.other is not None and torch.equal(batch.input_ids, batch.other.input_ids)
    both = paired_batches.heads(batch, pair=pair)
    mix, loss_weights = mix_of(pair, **{name: 1.0})
    mine = mix.score(both.view, both.signal, batch, loss_weights, mix.counts([batch])).terms[name]
    dense = DenseSignal(both.signal.hidden, both.signal.head)
    options: dict[str, Any] = {"kd_weight": 1.0, "ce_weight": 0.0, "divergence": make("forward_kl", {})}
    kd = score_head(both.view, dense, batch.scored_targets, **options).terms["kd"]
    assert int(mine.count) == int(kd.count) == batch.num_scored
    assert float(mine.mean) == pytest.approx(float(kd.mean), rel=1e-5)


def test_vocabularies_that_cannot_be_compared_are_refused_by_name() -> None:
    config = ObjectivesConfig.model_validate({"exact_match": {"weight": 1.0}})
    for matched in (None, TokenMatch((), (), 3, 3), TokenMatch((1,), (1,), 0, 3), TokenMatch((), (), 0, 0, "because")):
        with refused(ConfigError, "objectives.exact_match.weight"):
            plan_objectives(config, ModelDims(1, 4), ModelDims(1, 4), matched=matched)
    config = ObjectivesConfig.model_validate({"prefix_match": {"weight": 1.0}})
    for matched in (None, TokenMatch((1,), (1,), 0, 0), TokenMatch((), (), 0, 0, "because")):
        with refused(ConfigError, "objectives.prefix_match.weight"):
            plan_objectives(config, ModelDims(1, 4), ModelDims(1, 4), matched=matched)


def test_a_batch_without_the_teachers_rows_is_refused(batch: Batch) -> None:
    both = paired_batches.heads(batch)
    with refused(ConfigError, "objectives"):
        scored(replace(batch, other=None), both, "uld")
    mix, loss_weights = mix_of(alm=1.0)
    dense = DenseSignal(both.signal.hidden, both.signal.head)
    with refused(ConfigError, "objectives"):
        mix.score(both.view, dense, batch, loss_weights, mix.counts([batch]))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_with_nothing_to_score_has_a_loss_and_a_gradient_of_0(batch: Batch, name: str) -> None:
    empty = batch.without_targets()
    both = paired_batches.heads(empty)
    mix, loss_weights = mix_of(**{name: 0.7})
    score = mix.score(both.view, both.signal, empty, loss_weights, mix.counts([empty]))
    assert float(score.loss.detach()) == 0.0 and mix.counts([empty])[name] == 0
    score.loss.backward()
    assert both.view.head.weight.grad is not None and not both.view.head.weight.grad.any()


def test_a_group_that_underflows_keeps_a_finite_value_and_a_gradient() -> None:
    """Tokens 1 and 2 are one group, 500 nats below token 0; so is token 3, alone."""
    sums = GroupSums.of((0, 1, 1, 2), 3, 5, torch.device("cpu"))  # the head's fifth row is padding
    logits = torch.tensor([[0.0, -500.0, -501.0, -500.0, -600.0]], requires_grad=True)
    masses = sums.log_masses(logits)
    assert masses[0].tolist() == pytest.approx([0.0, -500.0, -500.0], abs=1.0)
    masses[0, 1].backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all() and logits.grad[0, 1] == 1.0


# -- from a few tokens of the teacher ----------------------------------------------------------------------


def few_of(
    batch: Batch, both: paired_batches.Heads, spec: SignalSpec, key: str = "row", name: str = "exact_match"
) -> paired_batches.Heads:
    """The same student beside what is kept of the teacher's answer."""
    assert batch.other is not None
    matched, size = matched_of(paired_batches.PAIR), both.signal.head.num_real
    coarse: Coarse | None = None
    if spec.kind != "target":
        by_groups = name == "prefix_match"
        groups = TokenGroups.of(matched.teacher_groups, matched.num_groups, size)
        coarse = groups if by_groups else SharedTokens.of(matched.teacher_ids, size)
        assert bool((coarse.kept.diff() > 0).all())
    answer = reduce_row(both.signal.hidden, both.signal.head, batch.other.scored_targets, spec, key, coarse)
    signal = signal_of(answer, spec.within(10_000 if coarse is None else len(coarse.kept)))
    return paired_batches.Heads(both.view, signal)  # type: ignore[arg-type]


def spec_of(kind: str, exact: int = 0, draws: int = 0) -> SignalSpec:
    return SignalSpec(kind, exact, draws, is_paired=True, shared="x")  # type: ignore[arg-type]


def test_likelihoods_from_stored_targets_are_those_of_the_whole_answer(batch: Batch) -> None:
    both = paired_batches.heads(batch)
    stored = few_of(batch, both, spec_of("target"))
    mine, right = (scored(batch, one, "alm") for one in (stored, both))
    assert float(mine.terms["alm"].total) == pytest.approx(float(right.terms["alm"].total), rel=1e-5)
    slopes = [torch.autograd.grad(score.loss, both.view.hidden)[0] for score in (mine, right)]
    assert torch.allclose(*slopes, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["exact_match", "prefix_match"])
def test_all_tokens_give_the_value_of_the_whole_answer_and_fewer_a_lower_bound(batch: Batch, name: str) -> None:
    """Log-probabilities are kept in steps of 1/256."""
    both = paired_batches.heads(batch)
    right = scored(batch, both, name).terms[name]
    found = [
        float(scored(batch, few_of(batch, both, spec_of("top_k", k), name=name), name).terms[name].mean)
        for k in (1, 8, 32, 10_000)
    ]
    assert found == sorted(found) and found[-1] == pytest.approx(float(right.mean), rel=2e-3)


@pytest.mark.parametrize("name", ["exact_match", "prefix_match"])
@pytest.mark.parametrize(("kind", "exact"), [("sampled", 0), ("hybrid", 3)])
def test_draws_estimate_value_and_gradient_without_bias(batch: Batch, kind: str, exact: int, name: str) -> None:
    both = paired_batches.heads(batch)
    right = scored(batch, both, name)
    (slope,) = torch.autograd.grad(right.loss, both.view.hidden)
    values, slopes = [], []
    for number in range(30):
        one = scored(batch, few_of(batch, both, spec_of(kind, exact, 12), f"row {number}", name), name)
        values.append(float(one.terms[name].mean))
        slopes.append(torch.autograd.grad(one.loss, both.view.hidden)[0])
    spread = torch.tensor(values)
    error = float(spread.std()) / math.sqrt(len(values))
    assert abs(float(spread.mean()) - float(right.terms[name].mean)) < 4 * error + 2e-3
    whole, each = slope.flatten(), torch.stack(slopes).flatten(1)
    mean = each.mean(0)
    assert float((mean @ whole) / (mean.norm() * whole.norm())) > 0.98
    assert float(mean @ whole / (whole @ whole)) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("name", ["exact_match", "prefix_match"])
@pytest.mark.parametrize("kind", ["sampled", "hybrid", "top_k"])
def test_the_gradient_from_few_tokens_is_a_finite_difference(batch: Batch, kind: str, name: str) -> None:
    both = paired_batches.heads(batch, dtype=torch.float64)
    spec = spec_of(kind, 0 if kind == "sampled" else 4, 0 if kind == "top_k" else 5)
    few = few_of(batch, both, spec, name=name)
    leaf = both.view.hidden
    (gradient,) = torch.autograd.grad(scored(batch, few, name).loss, leaf)
    direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(step: float) -> float:
        moved = replace(both.view, hidden=leaf.detach() + step * direction)
        return float(scored(batch, paired_batches.Heads(moved, few.signal), name).loss.detach())

    assert float((gradient * direction).sum()) == pytest.approx((loss(1e-6) - loss(-1e-6)) / 2e-6, rel=1e-5)


def test_an_unusable_stored_answer_is_left_out_and_counted(batch: Batch) -> None:
    both = paired_batches.heads(batch)
    slots = SpanSlots.of(batch)
    _, theirs = slots.first_positions(slots.is_exact)
    hidden = both.signal.hidden.clone()
    hidden[theirs[0]] = math.nan
    spoiled = paired_batches.Heads(both.view, replace(both.signal, hidden=hidden))
    few = ("alm", spec_of("target")), ("exact_match", spec_of("hybrid", 3, 4)), ("exact_match", spec_of("top_k", 5))
    for name, spec in few:
        score = scored(batch, few_of(batch, spoiled, spec), name)
        assert int(score.counters["bad_teacher_rows"]) == 1 and math.isfinite(float(score.loss.detach()))
        (gradient,) = torch.autograd.grad(score.loss, both.view.hidden)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", ["uld", "span_hidden"])
def test_what_stored_answers_cannot_serve_is_refused_by_name(batch: Batch, name: str) -> None:
    both = paired_batches.heads(batch)
    with refused(ConfigError, f"objectives.{name}.weight"):
        scored(batch, few_of(batch, both, spec_of("hybrid", 3, 4)), name)


# -- a teacher that is trained -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_to_a_trained_teacher_is_a_finite_difference(batch: Batch, name: str) -> None:
    both = paired_batches.heads(batch, dtype=torch.float64)
    taken = both.signal.taps["hidden.0"] if name == "span_hidden" else both.signal.hidden
    leaf = taken.clone().requires_grad_()

    def told(states: torch.Tensor) -> paired_batches.Heads:
        signal = (
            replace(both.signal, taps={"hidden.0": states})
            if name == "span_hidden"
            else replace(both.signal, hidden=states)
        )
        return paired_batches.Heads(both.view, signal)

    score = scored(batch, told(leaf), name)
    (gradient,) = torch.autograd.grad(score.loss, leaf)
    direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    direction = direction / direction.norm()
    step = 1e-5
    up, down = (float(scored(batch, told(taken + sign * step * direction), name).loss.detach()) for sign in (1, -1))
    assert float((gradient * direction).sum()) == pytest.approx((up - down) / (2 * step), rel=1e-4, abs=1e-9)
    frozen = scored(batch, told(taken), name)
    assert torch.equal(score.terms[name].total, frozen.terms[name].total), "the value is that of a frozen teacher"


@pytest.mark.parametrize("name", NAMES)
def test_a_trained_teacher_that_is_not_finite_somewhere_has_a_finite_gradient_elsewhere(
    batch: Batch, name: str
) -> None:
    both = paired_batches.heads(batch)
    hidden, taps = both.signal.hidden.clone(), both.signal.taps["hidden.0"].clone()
    slots = SpanSlots.of(batch)
    _, theirs = slots.first_positions(slots.is_exact)
    hidden[theirs[0]] = math.nan
    assert batch.other is not None
    taps.reshape(-1, taps.shape[-1])[batch.other.positions[theirs[0]]] = math.nan
    leaves = hidden.requires_grad_(), taps.requires_grad_()
    spoiled = replace(both.signal, hidden=leaves[0], taps={"hidden.0": leaves[1]})
    score = scored(batch, paired_batches.Heads(both.view, spoiled), name)
    assert int(score.counters["bad_teacher_rows"]) == 1
    (gradient,) = torch.autograd.grad(score.loss, leaves[1] if name == "span_hidden" else leaves[0])
    assert torch.isfinite(gradient).all() and gradient.any()
