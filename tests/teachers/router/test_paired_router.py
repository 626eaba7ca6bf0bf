"""Trained gates of a teacher that reads its own tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pair_tokenizers
import paired_batches
import pytest
import tiny
import torch
from refusals import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stillroom.config import load_config
from stillroom.config.schema import ObjectivesConfig, RouterConfig
from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch, DenseSignal, LossWeights, Needs, PairedSignal
from stillroom.data.two_tokenizers.align import Coverage
from stillroom.losses.mix import Mix, ModelDims, plan_objectives
from stillroom.teachers import GateOptions, RouterTeacher
from stillroom.teachers.paired import PairedTeacher, matched_tokens
from stillroom.teachers.router.teacher import PairedRouterTraining, span_divergence
from stillroom.telemetry import read_events
from stillroom.training.distill import distill
from stillroom.training.finish import Result

NAMES = ("alm", "exact_match", "prefix_match", "uld", "span_hidden")
WIDTH = 32


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    return paired_batches.corpus(tmp_path_factory.mktemp("paired"), packing="rows").train.batch(range(4))


def router(mode: str, **over: Any) -> PairedTeacher:
    tokenizer = pair_tokenizers.built(paired_batches.PAIR[1])
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(tiny.config("mixtral", vocab_size=len(tokenizer), width=WIDTH)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    inner = RouterTeacher(
        network.requires_grad_(False),
        RouterConfig(**{"mode": mode, "every": 1, **over}),
        vocab_size=len(tokenizer),
        device=torch.device("cpu"),
        options=GateOptions(learning_rate=1e-2),
        is_described=True,
    )
    inner.own_training = PairedRouterTraining(inner)
    return PairedTeacher(inner, tokenizer, Coverage(), inner.training)


def mix_of(name: str, num_layers: int) -> tuple[Mix, LossWeights]:
    config = ObjectivesConfig.model_validate({"kd": {"weight": 0.0}, "ce": {"weight": 0.5}, name: {"weight": 0.7}})
    matched = matched_tokens(*(pair_tokenizers.built(one) for one in paired_batches.PAIR))
    planned = plan_objectives(config, ModelDims(1, 12), ModelDims(num_layers, WIDTH), matched=matched)
    loss_weights = LossWeights(
        "x", {"kd": 0.0, "ce": 0.5, name: 0.7}, {"alm.temperature": 100.0, "kd.temperature": 1.0}
    )
    return Mix(config, planned=planned), loss_weights


def gradients(teacher: PairedTeacher) -> dict[str, torch.Tensor]:
    found = {name: weight.grad for name, weight in teacher.training.trained_weights().items()}
    return {name: slope.clone() for name, slope in found.items() if slope is not None}


@pytest.mark.parametrize("weight", [1.0, -0.5])
@pytest.mark.parametrize("name", NAMES)
def test_the_students_backward_goes_on_into_the_gates(batch: Batch, name: str, weight: float) -> None:
    """The gates' gradient is that of the objective to the teacher's states, sent through the teacher."""
    both = paired_batches.heads(batch)
    teacher = router("sar-joint", student_weight=weight, truth_weight=0.0, anchor_weight=0.0)
    mix, loss_weights = mix_of(name, 2)
    needs, counts = mix.needs(loss_weights).teacher, mix.counts([batch])
    teacher.training.begin([batch], 0)
    with teacher.training.joint_graph(batch):
        (signal,) = teacher.training.answers(batch, needs)
        score = mix.score(both.view, signal, batch, loss_weights, counts)
        (score.loss + teacher.training.extra_loss(batch, both.view, num_targets=counts["ce"])).backward()
    joint = gradients(teacher)
    assert joint and all(slope.any() for slope in joint.values())
    assert isinstance(signal, PairedSignal) and both.view.hidden.grad is not None

    teacher.training.begin([batch], 0)
    with teacher.training.joint_graph(batch):
        (live,) = teacher.training.answers(batch, needs)
        assert isinstance(live, PairedSignal)
        states = {"hidden": live.hidden, **live.taps}
        leaves = {key: one.detach().requires_grad_() for key, one in states.items()}
        told = replace(live, hidden=leaves.pop("hidden"), taps=leaves)
        loss = mix.score(both.view, told, batch, loss_weights, counts).loss
        given = [told.hidden, *told.taps.values()]
        slopes = torch.autograd.grad(loss, given, allow_unused=True)
        used = [(one, slope) for one, slope in zip(states.values(), slopes, strict=True) if slope is not None]
        torch.autograd.backward([one for one, _ in used], [slope for _, slope in used])
    for key, slope in gradients(teacher).items():
        assert torch.allclose(slope, joint[key], rtol=1e-4, atol=1e-5 * float(joint[key].abs().max())), key


def test_the_students_term_of_sar_is_a_finite_difference_of_span_divergence(batch: Batch) -> None:
    both = paired_batches.heads(batch, dtype=torch.float64)
    leaf = both.signal.hidden.clone().requires_grad_()
    term = span_divergence(DenseSignal(leaf, both.signal.head), both.view, batch)
    (gradient,) = torch.autograd.grad(term.total, leaf)
    direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def total(step: float) -> float:
        moved = DenseSignal(leaf.detach() + step * direction, both.signal.head)
        return float(span_divergence(moved, both.view, batch).total)

    assert float((gradient * direction).sum()) == pytest.approx((total(1e-6) - total(-1e-6)) / 2e-6, rel=1e-5)
    assert both.view.hidden.grad is None and float(term.count) > 0


def test_the_gates_learn_alike_from_one_micro_batch_and_from_several(batch: Batch) -> None:
    both = paired_batches.heads(batch)
    whole, parted = router("sar"), router("sar")
    whole.training.begin([batch], 0)
    whole.training.after_student(batch, both.view, num_targets=batch.num_scored)
    parts = list(batch.parts(4))
    parted.training.begin(parts, 0)
    for number, part in enumerate(parts):
        own = both.rows(batch, slice(number, number + 1))
        parted.training.after_student(part, own.view, num_targets=batch.num_scored)
    for key, slope in gradients(whole).items():
        assert torch.allclose(slope, gradients(parted)[key], rtol=1e-3, atol=1e-5 * float(slope.abs().max())), key


# -- whole runs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    for role, family, name in (("teacher", "mixtral", "BPE with bytes"), ("student", "llama", "byte-level")):
        tokenizer = pair_tokenizers.built(name)
        tiny.save_model(folder / role, family, vocab_size=len(tokenizer), with_tokenizer=False, width=32, num_layers=1)
        tokenizer.save_pretrained(folder / role)
    tiny.save_text(folder / "train.jsonl", 40)
    return folder


def run(pair: Path, out: Path, mode: str, **over: Any) -> Result:
    settings = {
        "teacher__router__mode": mode, "teacher__router__every": 1, "teacher__router__max_degradation": 5.0,
        "train__max_steps": 3, "train__eval_steps": 3, "eval__samples": 0, **over,
    }  # fmt: skip
    return distill(load_config(preset="cross-tokenizer", overrides=tiny.settings(pair, **settings)), out, device="cpu")


@pytest.mark.parametrize("mode", ["all-experts", "knowledge-augmentation", "truth", "sar", "sar-joint"])
def test_every_mode_that_needs_no_common_tokens_runs_to_the_end(pair: Path, tmp_path: Path, mode: str) -> None:
    over = {f"objectives__{name}__weight": 0.1 for name in NAMES[1:]} if mode == "sar-joint" else {}
    summary = run(pair, tmp_path / "run", mode, teacher__router__probe_steps=0 if over else 1,
                  teacher__router__force=True, **over).summary  # fmt: skip
    assert summary["status"] == "done" and summary["skipped"] == 0
    is_trained = mode in ("truth", "sar", "sar-joint")
    assert summary["router"]["updates"] == (3 if is_trained else 0) and summary["router"]["skipped"] == 0
    told = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "router"]
    assert (told[-1]["kl_to_original"] > 0) == is_trained
    assert ("student" in told[-1]["terms"]) == (mode == "sar")
    if is_trained:
        gates = load_file(tmp_path / "run" / "router" / "gates.safetensors")
        assert all(torch.isfinite(one).all() for one in gates.values())


@pytest.mark.parametrize("mode", ["sar-transient", "sar-meta"])
def test_modes_that_need_the_same_tokens_are_refused_by_name(pair: Path, tmp_path: Path, mode: str) -> None:
    with refused(ConfigError, "teacher.router.mode", mode) as caught:
        run(pair, tmp_path / "run", mode)
    assert caught.value.exit_code == 2


def test_needs_are_passed_on_to_the_teachers_own_rows(batch: Batch) -> None:
    teacher = router("truth")
    signal = teacher.observe(batch, Needs(hidden_layers=frozenset({0})))
    assert isinstance(signal, PairedSignal) and batch.other is not None
    assert signal.taps["hidden.0"].shape[:2] == batch.other.input_ids.shape
