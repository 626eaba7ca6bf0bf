"""Laws of the inner terms on real models of different depth, width, heads and family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from stillroom.config.schema import ObjectivesConfig
from stillroom.core.errors import ConfigError
from stillroom.core.types import IGNORED, Batch, LossWeights, Needs, Score
from stillroom.losses.hidden import InnerObjective
from stillroom.losses.mix import Mix, ModelDims, Planned, plan_objectives
from stillroom.models import Student, anatomy_of, gives_attention
from stillroom.models.student import attend_causally, show_attention
from stillroom.teachers import LiveTeacher

NAMES = ("feature", "attention", "layerwise", "contrastive")
FAMILIES = [
    "llama", "gpt2", "qwen3", "qwen3_moe", "mixtral", "olmoe", "gemma2", "granite", "phi", "opt", "gpt_neox",
]  # fmt: skip
PHASES = [
    LossWeights(
        "logits", {"kd": 0.7, "ce": 0.3, "feature": 0.0, "attention": 0.0, "layerwise": 0.0, "contrastive": 0.0}
    ),
    LossWeights(
        "features", {"kd": 0.7, "ce": 0.3, "feature": 0.1, "attention": 0.2, "layerwise": 0.0, "contrastive": 0.0}
    ),
    LossWeights("all", {"kd": 0.7, "ce": 0.3, "feature": 0.1, "attention": 0.2, "layerwise": 0.3, "contrastive": 0.4}),
]


class Pair:
    """A teacher and a student that differ in everything but the vocabulary, and the mix between them."""

    def __init__(self, teacher: str = "gpt2", student: str = "llama", dtype: torch.dtype = torch.float64) -> None:
        big, small = tiny.config(teacher, width=48, num_layers=4), tiny.config(student, width=32, num_layers=2)
        big.num_attention_heads = 4 if teacher == "gpt2" else big.num_attention_heads
        torch.manual_seed(0)
        self.teacher_model = AutoModelForCausalLM.from_config(big).to(dtype).eval().requires_grad_(False)
        self.model = AutoModelForCausalLM.from_config(small).to(dtype).eval()
        for model in (self.teacher_model, self.model):
            attend_causally(model)
            show_attention(model)
        config = ObjectivesConfig.model_validate({name: {"weight": 0.1} for name in NAMES})
        self.inner = plan_objectives(config, inside(self.model), inside(self.teacher_model), seed=1)
        self.inner.projectors.to(dtype)
        self.mix = Mix(config, planned=self.inner)
        self.student = Student(self.model, vocab_size=tiny.VOCAB, is_described=True)
        self.teacher = LiveTeacher(
            self.teacher_model,
            vocab_size=tiny.VOCAB,
            device=torch.device("cpu"),
            offload=False,
            is_described=True,
        )

    def score(self, batch: Batch, loss_weights: LossWeights, counts: dict[str, int] | None = None) -> Score:
        needs = self.mix.needs(loss_weights)
        signal = self.teacher.observe(batch, needs.teacher)
        view = self.student.observe(batch, needs.student)
        return self.mix.score(view, signal, batch, loss_weights, counts or self.mix.counts([batch]))

    def gradients(self) -> dict[str, Tensor]:
        named = [*self.model.named_parameters(), *self.inner.projectors.named_parameters(prefix="projectors")]
        found = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
        for _name, parameter in named:
            parameter.grad = None
        return found


def inside(model: Any) -> ModelDims:
    return ModelDims(anatomy_of(model).num_layers, anatomy_of(model).width)


def ragged(num_rows: int = 8, length: int = 12) -> Batch:
    """Rows of different lengths, padded on the right, with an unscored prompt in some of them."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, tiny.VOCAB, (num_rows, length), generator=generator)
    targets = ids.roll(-1, dims=1)
    for row in range(num_rows):
        end = 3 + (row * 5) % (length - 3)
        targets[row, end:] = IGNORED
        targets[row, : row % 3] = IGNORED
        ids[row, end + 1 :] = 1
    return Batch(ids, torch.ones_like(ids), targets, torch.zeros_like(ids), tuple(map(str, range(num_rows))))


def rows_of(batch: Batch, part: slice, *, cut: bool = False) -> Batch:
    """Some rows, cut after the last scored position if asked: a micro-batch is as long as its longest row."""
    targets = batch.targets[part]
    stop = int((targets != IGNORED).any(0).nonzero().max()) + 1 if cut else targets.shape[1]
    return Batch(
        batch.input_ids[part, :stop],
        batch.attention_mask[part, :stop],
        targets[:, :stop],
        batch.target_bytes[part, :stop],
        batch.sample_ids[part],
    )


def without(loss_weights: LossWeights, name: str) -> LossWeights:
    return replace(loss_weights, weights={**loss_weights.weights, name: 0.0})


# -- micro-batches, masks, evaluation --------------------------------------------------------------------


@pytest.mark.parametrize("cut", [False, True])
def test_eight_micro_batches_equal_one(cut: bool) -> None:
    pair, batch = Pair(), ragged()
    loss_weights = without(PHASES[2], "contrastive")  # its negatives are the rows of the micro-batch: see the next law
    counts = pair.mix.counts([batch])
    one = pair.score(batch, loss_weights, counts)
    one.loss.backward()
    whole = pair.gradients()
    totals = dict.fromkeys(one.terms, 0.0)
    for row in range(8):
        score = pair.score(rows_of(batch, slice(row, row + 1), cut=cut), loss_weights, counts)
        score.loss.backward()
        for name, term in score.terms.items():
            totals[name] += float(term.total)
    parts = pair.gradients()
    for name in ("kd", "ce", "feature", "attention", "layerwise"):
        assert totals[name] == pytest.approx(float(one.terms[name].total), rel=1e-6)
    assert whole.keys() == parts.keys() and any(name.startswith("projectors.layerwise") for name in whole)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-6, atol=1e-9)


def test_contrast_depends_on_the_micro_batch_and_a_row_alone_is_counted() -> None:
    pair, batch = Pair(), ragged()
    counts = pair.mix.counts([batch])
    assert counts["contrastive"] == 8, "rows, not positions"
    whole = pair.score(batch, PHASES[2], counts)
    alone = pair.score(rows_of(batch, slice(0, 1)), PHASES[2], counts)
    assert float(whole.terms["contrastive"].total) > 0 and float(whole.counters["rows_without_contrast"]) == 0
    assert float(alone.terms["contrastive"].total) == 0 and float(alone.counters["rows_without_contrast"]) == 1


@pytest.mark.parametrize("loss_weights", PHASES, ids=lambda loss_weights: loss_weights.phase)
def test_what_stands_in_the_padding_does_not_matter(loss_weights: LossWeights) -> None:
    pair, batch = Pair(), ragged()
    noise = torch.randint(2, tiny.VOCAB, batch.input_ids.shape, generator=torch.Generator().manual_seed(9))
    other = replace(batch, input_ids=torch.where(batch.input_ids == 1, noise, batch.input_ids))
    longer = torch.nn.functional.pad
    padded = Batch(
        longer(other.input_ids, (0, 5), value=7),
        longer(other.attention_mask, (0, 5)),
        longer(other.targets, (0, 5), value=IGNORED),
        longer(other.target_bytes, (0, 5)),
        other.sample_ids,
    )
    scores = [pair.score(batch, loss_weights) for batch in (batch, other, padded)]
    assert set(scores[0].terms) == {name for name, weight in loss_weights.weights.items() if weight}
    for score in scores[1:]:
        for name, term in scores[0].terms.items():
            torch.testing.assert_close(score.terms[name].total, term.total, rtol=1e-9, atol=0)
            assert score.terms[name].count == term.count


def test_the_loss_is_weights_times_means() -> None:
    pair, batch = Pair(), ragged()
    score = pair.score(batch, PHASES[2])
    expected = sum(PHASES[2].weight(name) * term.mean for name, term in score.terms.items())
    torch.testing.assert_close(score.loss.detach(), expected)
    assert all(not term.total.requires_grad for term in score.terms.values())


# -- what is captured ------------------------------------------------------------------------------------


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    placed: list[str] = []
    original = nn.Module.register_forward_hook

    def counted(self: nn.Module, *args: Any, **options: Any) -> Any:
        placed.append(type(self).__name__)
        return original(self, *args, **options)

    monkeypatch.setattr(nn.Module, "register_forward_hook", counted)
    return placed


def test_a_weight_of_zero_asks_for_nothing_and_captures_nothing(hooks: list[str]) -> None:
    pair, batch = Pair(), ragged()
    hooks.clear()  # building compares attention on a few tokens
    assert pair.mix.needs(PHASES[0]).student == Needs() == pair.mix.needs(PHASES[0]).teacher
    score = pair.score(batch, PHASES[0])
    assert hooks == [] and set(score.terms) == {"kd", "ce"}
    pair.score(batch, PHASES[2])
    # The student's two layers and the teacher's two counterparts, and the attention of each.
    assert sorted(hooks) == sorted(2 * ["LlamaDecoderLayer", "LlamaAttention", "GPT2Block", "GPT2Attention"])


def test_the_attention_maps_of_other_layers_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from stillroom.models import student as attention

    opened: list[int] = []
    original = attention._attend_in_the_open
    monkeypatch.setattr(attention, "_attend_in_the_open", lambda *args: (opened.append(1), original(*args))[1])
    pair, batch = Pair(), ragged()
    config = ObjectivesConfig.model_validate({"attention": {"weight": 0.1, "attention_layers": 1}})
    pair.inner = plan_objectives(config, inside(pair.model), inside(pair.teacher_model))
    pair.mix = Mix(config, planned=pair.inner)
    pair.score(batch, PHASES[0])
    assert opened == []
    pair.score(batch, PHASES[1])
    assert len(opened) == 2, "one layer of each model"
    pair.score(batch, PHASES[0])
    assert len(opened) == 2, "closed again"


@pytest.mark.parametrize("family", FAMILIES)
def test_tapped_attention_is_the_models_own(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.config(family)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    batch = ragged(2, 9)
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    own = model(batch.input_ids, output_attentions=True).attentions
    before = model(batch.input_ids).logits
    model.set_attn_implementation(usual)
    attend_causally(model)
    show_attention(model)
    assert gives_attention(model, {0, 1})
    student = Student(model, vocab_size=tiny.VOCAB, is_described=True)
    view = student.observe(batch, Needs(attention_layers=frozenset({1})))
    assert set(view.taps) == {"attention.1"}
    torch.testing.assert_close(view.taps["attention.1"], own[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model(batch.input_ids).logits, before, rtol=1e-4, atol=1e-4)


def test_a_model_that_hides_its_attention_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    model = AutoModelForCausalLM.from_config(tiny.config("llama"))
    original = LlamaAttention.forward
    monkeypatch.setattr(LlamaAttention, "forward", lambda *args, **options: (original(*args, **options)[0], None))
    show_attention(model)
    assert not gives_attention(model, {0})


@pytest.mark.parametrize(("teacher", "student"), [("gpt2", "llama"), ("gemma2", "gpt2"), ("qwen3", "opt")])
def test_gradient_checkpointing_gives_the_same_gradients(teacher: str, student: str) -> None:
    pair, batch = Pair(teacher, student), ragged()
    for module in pair.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    pair.model.config.use_cache = False
    pair.model.train()
    if hasattr(pair.model.config, "dropout"):
        for module in pair.model.modules():
            if hasattr(module, "dropout") and isinstance(module.dropout, float):
                module.dropout = 0.0
    pair.score(batch, PHASES[2]).loss.backward()
    plain = pair.gradients()
    pair.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pair.score(batch, PHASES[2]).loss.backward()
    checkpointed = pair.gradients()
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-9, atol=1e-12)


# -- plans -----------------------------------------------------------------------------------------------


def planned(student: ModelDims, teacher: ModelDims, **sections: Any) -> Planned:
    return plan_objectives(ObjectivesConfig.model_validate(sections), student, teacher)


def test_a_projector_stands_only_where_widths_differ() -> None:
    same, other = ModelDims(2, 8), ModelDims(4, 16)
    assert not planned(same, ModelDims(4, 8), feature={"weight": 1.0}).projectors
    weights = dict(planned(same, other, layerwise={"weight": 1.0}).projectors.named_parameters())
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
        "layerwise_0_1.weight": (16, 8),
        "layerwise_1_3.weight": (16, 8),
    }


@pytest.mark.parametrize(("narrow", "wide"), [(8, 32), (8, 16)])
def test_a_fresh_projector_keeps_the_size_of_an_entry(narrow: int, wide: int) -> None:
    inner = planned(ModelDims(1, narrow), ModelDims(1, wide), feature={"weight": 1.0})
    states = torch.randn(100, narrow)
    projected = inner.projectors["feature_0_0"](states)
    torch.testing.assert_close(projected.square().mean(), states.square().mean(), rtol=1e-4, atol=0)


def test_projectors_depend_on_the_seed_alone() -> None:
    config = ObjectivesConfig.model_validate({"feature": {"weight": 1.0}})
    before = torch.get_rng_state()
    one, two, other = (plan_objectives(config, ModelDims(2, 8), ModelDims(2, 16), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    weights = [inner.projectors["feature_1_1"].weight for inner in (one, two, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])  # type: ignore[arg-type]


def test_attention_layers_keeps_the_last_pairs() -> None:
    inner = planned(ModelDims(4, 8), ModelDims(8, 8), attention={"weight": 1.0, "attention_layers": 2})
    (attention,) = inner.objectives
    assert isinstance(attention, InnerObjective) and attention.pairs == ((2, 5), (3, 7))
    assert not planned(ModelDims(4, 8), ModelDims(8, 8), attention={"weight": 1.0, "attention_layers": 0}).objectives


def test_a_layer_out_of_range_is_refused_when_the_run_is_planned() -> None:
    with refused(ConfigError, "objectives.feature.layers", "7"):
        planned(ModelDims(4, 8), ModelDims(4, 8), feature={"weight": 1.0, "layers": [[0, 7]]})


def test_different_positions_are_refused() -> None:
    pair, batch = Pair(), ragged()
    loss_weights = PHASES[1]
    needs = pair.mix.needs(loss_weights)
    view = pair.student.observe(batch, needs.student)
    signal = pair.teacher.observe(rows_of(batch, slice(0, 4)), needs.teacher)
    with refused(ConfigError, "objectives"):
        pair.inner.objectives[0].score(view, signal, batch, loss_weights, {"feature": 1.0})


def test_a_teacher_s_bad_state_counts_as_a_bad_row() -> None:
    pair, batch = Pair(), ragged()
    loss_weights = PHASES[1]
    needs = pair.mix.needs(loss_weights)
    signal = pair.teacher.observe(batch, needs.teacher)
    spoiled = {name: tap.clone() for name, tap in signal.taps.items()}
    spoiled["hidden.3"].view(-1, 48)[batch.positions[2]] = float("nan")
    view = pair.student.observe(batch, needs.student)
    score = pair.mix.score(view, replace(signal, taps=spoiled), batch, loss_weights, pair.mix.counts([batch]))
    score.loss.backward()
    assert float(score.counters["bad_teacher_rows"]) == 1 and torch.isfinite(score.loss)
    assert float(score.terms["feature"].count) == batch.num_scored - 1
    assert all(torch.isfinite(gradient).all() for gradient in pair.gradients().values())


def test_the_teacher_is_the_goal_and_gets_no_gradient() -> None:
    pair, batch = Pair(), ragged()
    loss_weights = PHASES[2]
    needs = pair.mix.needs(loss_weights)
    signal = pair.teacher.observe(batch, needs.teacher)
    taps = {name: tap.clone().requires_grad_() for name, tap in signal.taps.items()}
    view = pair.student.observe(batch, needs.student)
    pair.mix.score(view, replace(signal, taps=taps), batch, loss_weights, pair.mix.counts([batch])).loss.backward()
    assert len(taps) == 4 and all(tap.grad is None for tap in taps.values())
