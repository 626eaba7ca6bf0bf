"""Whole runs that train an adapter: what is kept, resumed, refused and written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import pytest
import tiny
import torch
from refusals import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stillroom.config import load_config
from stillroom.core.errors import CheckpointUnusable, ConfigError, Interrupted
from stillroom.losses.head import products
from stillroom.precision.policy import POLICIES
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume
from stillroom.training.faults import Injector
from stillroom.training.finish import Result
from stillroom.training.loop import Stop
from stillroom.training.run import RunState, weights_of
from stillroom.training.step import attempt, train_step

LORA = {"student__adapter__rank": 2, "train__learning_rate": 0.02}
QUICK = {**LORA, "eval__samples": 0, "eval__max_batches": 2}


def run(world: Path, out: Path, **over: Any) -> Result:
    return distill(load_config(overrides=tiny.settings(world, **{**QUICK, **over})), out, device="cpu")


def notes(folder: Path) -> list[str]:
    return [event["text"] for event in read_events(folder / "events.jsonl") if event["event"] == "note"]


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "student" / "adapter" / "adapter_model.safetensors")


def assert_same_student(one: Path, other: Path) -> None:
    for part in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (one / "student" / part).read_bytes() == (other / "student" / part).read_bytes(), part


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_one_percent_is_trained_and_a_checkpoint_is_in_proportion(world: Path, tmp_path: Path) -> None:
    """A student of 2.7 million parameters: its base is in no checkpoint."""
    student = tiny.save_model(tmp_path / "student", width=192, num_layers=4)
    over = {"student__model": str(student), "train__max_steps": 2, "train__eval_steps": 2, "data__max_length": 16}
    result = run(world, tmp_path / "run", **over, student__adapter__rank=1)
    start = next(event for event in read_events(result.folder / "events.jsonl") if event["event"] == "run_start")
    trained, whole = start["student"]["trained"], start["student"]["parameters"]
    assert 0 < trained <= 0.01 * whole and result.summary["trained_parameters"] == trained
    assert whole == result.summary["student"]["parameters"] == result.summary["student_before"]["parameters"]
    # Weights, two moments and the best student in FP32, the random state, and a header for each of the 28 layers.
    saved = bytes_of(result.folder / "checkpoints" / "step-000002")
    assert 4 * 4 * trained < saved < 4 * 4 * trained + 60_000 < 0.1 * 4 * whole
    assert bytes_of(result.folder / "student" / "adapter") < 4 * trained + 20_000
    assert any(f"{trained:,} parameters are trained" in note for note in notes(result.folder))


@pytest.mark.parametrize("mode", list(POLICIES))
def test_every_policy_trains_an_fp32_adapter_over_its_base(make_run: Any, mode: str) -> None:
    run = make_run(**LORA, precision__mode=mode)
    base = {name: part for name, part in run.student.model.named_parameters() if not part.requires_grad}
    halves = {"fp32": torch.float32, "bf16-mixed": torch.bfloat16}.get(mode, torch.float16)
    assert all(part.dtype == halves for name, part in base.items() if "base_layer" in name)
    before = {name: part.clone() for name, part in base.items()}
    state = RunState()
    losses = [train_step(run, state, run.loader.window(0)).evidence.loss for _ in range(6)]
    assert losses[-1] < losses[0] - 0.01
    cells = run.optimizer.cells["student"]
    assert {cell.parameter.dtype for cell in cells} == {torch.float32}
    assert {cell.name for cell in cells} == set(weights_of(run.student.model))
    assert all("lora_" in name for name in weights_of(run.student.model))
    assert all(torch.equal(part, before[name]) for name, part in base.items())


@pytest.mark.parametrize("mode", ["fp16-master", "fp16-split", "fp16-sr"])
def test_a_base_that_a_policy_cannot_have_is_refused_by_name(make_run: Any, mode: str) -> None:
    with refused(ConfigError, "student.adapter.base_dtype", mode):
        make_run(**LORA, precision__mode=mode, student__adapter__base_dtype="float32")


def test_a_half_base_serves_an_fp32_run_and_its_student_is_whole(world: Path, tmp_path: Path) -> None:
    over = {"precision__mode": "fp32", "student__adapter__base_dtype": "float16", "eval__samples": 1}
    result = run(world, tmp_path / "run", **over)
    assert result.summary["student"]["perplexity"] < result.summary["student_before"]["perplexity"]
    assert any("stored in float16" in note for note in notes(result.folder))
    assert any("logits differ by" in note for note in notes(result.folder))


@pytest.mark.parametrize("mode", ["fp32", "fp16-mixed", "bf16-mixed"])
def test_an_int8_base_learns_and_its_student_has_the_numbers_of_the_codes(
    world: Path, tmp_path: Path, mode: str
) -> None:
    result = run(world, tmp_path / "run", precision__mode=mode, student__adapter__base_dtype="int8")
    assert result.summary["student"]["perplexity"] < result.summary["student_before"]["perplexity"]
    assert any("stored in int8" in note for note in notes(result.folder))
    assert any("logits differ by" in note for note in notes(result.folder))
    written = load_file(result.folder / "student" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}


@pytest.mark.parametrize(
    "over",
    [
        {},
        {"student__adapter__kind": "dora", "student__gradient_checkpointing": True},
        {"precision__mode": "fp16-split", "train__gradient_accumulation_steps": 2},
        {"precision__mode": "fp16-mixed", "objectives__feature__weight": 0.1},
        {"student__adapter__base_dtype": "int8", "student__gradient_checkpointing": True},
    ],
    ids=["lora", "dora", "half", "projector", "int8"],
)
def test_n_steps_equal_k_and_n_minus_k_with_dropout(
    world: Path, tmp_path: Path, over: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    over = {"student__adapter__dropout": 0.3, "train__batch_size": 2, **over}
    whole = run(world, tmp_path / "whole", **over)
    wanted = iter([False, False, True])
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, False))
        with pytest.raises(Interrupted):
            run(world, tmp_path / "parts", **over)
    assert (tmp_path / "parts" / "student" / "adapter").is_dir(), "a stopped run leaves a student too"
    assert_same_student(whole.folder, resume(tmp_path / "parts", device="cpu").folder)


def test_a_run_is_not_continued_on_another_base(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student = Path(shutil.copytree(world / "student", tmp_path / "student"))
    wanted = iter([False, False, True])
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, False))
        with pytest.raises(Interrupted):
            run(world, tmp_path / "run", student__model=str(student))
    model = AutoModelForCausalLM.from_pretrained(student)
    model.model.norm.weight.data[0] += 1e-6
    model.save_pretrained(student)
    with pytest.raises(CheckpointUnusable) as caught:
        resume(tmp_path / "run", device="cpu")
    assert caught.value.exit_code == 25 and caught.value.where == str(student)


@pytest.mark.parametrize("mode", ["fp32", "fp16-mixed", "fp16-master"])
def test_a_skipped_step_leaves_every_weight_bitwise_equal(make_run: Any, mode: str) -> None:
    run = make_run(**LORA, precision__mode=mode, guard__max_retries=0, student__adapter__dropout=0.1)
    state = RunState()
    for index in range(3):
        train_step(run, state, run.loader.window(index))
    before = {name: part.clone() for name, part in run.student.model.named_parameters()}
    moments = {name: part.clone() for name, part in run.optimizer.tensors().items()}
    run = replace(run, hooks=Injector("nan_grad@4"))
    assert train_step(run, state, run.loader.window(3)).verdict.action == "skip"
    assert all(torch.equal(part, before[name]) for name, part in run.student.model.named_parameters())
    assert all(torch.equal(part, moments[name]) for name, part in run.optimizer.tensors().items())


def test_a_spoiled_adapter_is_rolled_back_and_the_run_goes_on(world: Path, tmp_path: Path) -> None:
    config = load_config(overrides=tiny.settings(world, **QUICK))
    result = distill(config, tmp_path / "run", device="cpu", inject="nan_weight@3,nan_embedding@5")
    assert result.summary["status"] == "done" and result.summary["rollbacks"] == 1
    assert any("the embedding is frozen" in note for note in notes(result.folder))


def test_eight_micro_batches_of_one_equal_one_of_eight(make_run: Any) -> None:
    one = make_run(**LORA, train__batch_size=8)
    many = make_run(**LORA, train__batch_size=1, train__gradient_accumulation_steps=8)
    states = RunState(), RunState()
    for index in range(3):
        losses = [train_step(run, state, run.loader.window(index)).evidence.loss
                  for run, state in zip((one, many), states, strict=True)]  # fmt: skip
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    found = [weights_of(run.student.model) for run in (one, many)]
    for name, part in found[0].items():
        assert torch.allclose(part, found[1][name], atol=2e-5), name


def test_recomputed_layers_under_a_frozen_embedding_have_the_same_gradients(make_run: Any) -> None:
    plain, recomputed = make_run(**LORA), make_run(**LORA, student__gradient_checkpointing=True)
    for run in (plain, recomputed):
        attempt(run, RunState(), run.loader.window(0))
    gradients = [dict(run.optimizer.named_gradients()) for run in (plain, recomputed)]
    assert len(gradients[0]) == len(plain.optimizer.cells["student"]) > 0
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-7), name
    assert any(bool(gradient.any()) for gradient in gradients[1].values())


def test_projectors_are_trained_beside_an_adapter(make_run: Any) -> None:
    run = make_run(**LORA, objectives__feature__weight=1.0, precision__mode="fp16-master")
    before = {name: part.clone() for name, part in run.mix.projectors.named_parameters()}
    assert before
    train_step(run, RunState(), run.loader.window(0))
    assert all(not torch.equal(part, before[name]) for name, part in run.mix.projectors.named_parameters())


@pytest.mark.parametrize("mode", ["fp32", "fp16-mixed", "fp16-master"])
def test_a_frozen_head_costs_no_product_for_its_weight(
    make_run: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[products.Wanted] = []
    made = products.Products.__init__

    def watch(self: Any, *parts: Any) -> None:
        wanted.append(parts[4] if len(parts) > 4 else products.Wanted())
        made(self, *parts)

    monkeypatch.setattr(products.Products, "__init__", watch)
    for over, has_weight in ((LORA, False), ({}, True)):
        run = make_run(**over, precision__mode=mode)
        wanted.clear()
        attempt(run, RunState(), run.loader.window(0))
        student, teacher = wanted
        assert student.hidden and student.weight is has_weight and not teacher.hidden


def test_the_step_s_gradients_are_those_of_float64(make_run: Any) -> None:
    """Cross-entropy alone, by the model's own logits in float64, with the head frozen."""
    run = make_run(**LORA, objectives__kd__weight=0.0, objectives__ce__weight=1.0)
    train_step(run, RunState(), run.loader.window(1))  # B is zero before, and the gradient of A with it
    batch = run.loader.window(0)[0]
    attempt(run, RunState(), [batch])
    ours = {name: gradient.double().clone() for name, gradient in run.optimizer.named_gradients()}
    run.optimizer.zero_grad()
    model = run.student.model.double()
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100).backward()
    exact = {name: part.grad for name, part in model.named_parameters() if part.requires_grad}
    assert set(ours) == set(exact)
    largest = max(float(gradient.abs().max()) for gradient in exact.values())
    assert all(float((ours[name] - gradient).abs().max()) < 1e-5 * largest for name, gradient in exact.items())


def test_a_head_of_its_own_may_be_adapted_and_is_reached(make_run: Any) -> None:
    run = make_run(**LORA, student__adapter__targets=["lm_head"])
    assert not run.student.is_described
    losses = [train_step(run, RunState(), run.loader.window(0)).evidence.loss for _ in range(5)]
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_a_tied_head_is_refused_with_exit_code_2(
    world: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny.config("llama", width=16, num_layers=1)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    tiny.tokenizer().save_pretrained(tmp_path / "tied")
    over = {"student__model": str(tmp_path / "tied"), "student__adapter__targets": ["q_proj", name]}
    code, _out, errors = commands.run(capsys, *commands.arguments(world, tmp_path / "run", **over))
    assert code == 2 and "tied" in errors and "student.adapter.targets" in errors


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"student__adapter__targets": ["wq"]}, ["'wq'", "q_proj", "down_proj"]),
        ({"student__adapter__rank": 0}, ["student.adapter.rank"]),
        ({"student__adapter__dropout": 1.0}, ["student.adapter.dropout"]),
        ({"student__adapter__alpha": -1.0}, ["student.adapter.alpha"]),
        ({"student__adapter__kind": "ia3"}, ["student.adapter.kind", "dora"]),
        ({"student__adapter__base_dtype": "int4"}, ["student.adapter.base_dtype", "int8", "float16"]),
        ({"student__adapter__base_dtype": "int8", "student__adapter__kind": "dora"}, ["adapter", "int8", "dora"]),
        ({"student__adapter__rnak": 2}, ["student.adapter.rnak", "student.adapter.rank"]),
    ],
)
def test_what_cannot_be_meant_is_refused_with_exit_code_2(
    world: Path, tmp_path: Path, over: dict[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _out, errors = commands.run(capsys, *commands.arguments(world, tmp_path / "run", **over))
    assert code == 2 and all(word in errors for word in words), errors


def test_a_finished_run_can_be_evaluated_and_continues_a_prompt(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way by the command line: distil from a model into a copy of itself with less, evaluate, generate."""
    out = tmp_path / "run"
    over = {**LORA, "student__adapter__targets": ["q_proj", "v_proj"], "student__adapter__kind": "dora"}
    commands.output(capsys, *commands.arguments(world, out, **over))
    summary = json.loads((out / "summary.json").read_text())
    found = []
    for name in (out, out / "student", out / "student" / "adapter"):
        words = ["eval", "--model", str(name), "--data", str(world / "train.jsonl"), "--max-length", "32"]
        if name == out / "student" / "adapter":
            tiny.tokenizer().save_pretrained(name)
        found.append(json.loads(commands.output(capsys, *words, "--json"))["student"]["perplexity"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)
    assert found[0] < summary["student_before"]["perplexity"]
    text = commands.output(capsys, "generate", str(out), "--prompt", "the still", "--max-new-tokens", "4")
    assert text.startswith("the still")
    assert not any("adapter" in path.name for path in (out / "student").glob("*.json"))


def test_an_adapter_as_the_start_is_merged_with_or_without_a_second_one(world: Path, tmp_path: Path) -> None:
    first = run(world, tmp_path / "first", train__max_steps=4)
    start = first.folder / "student" / "adapter"
    tiny.tokenizer().save_pretrained(start)
    second = run(world, tmp_path / "second", student__model=str(start), train__max_steps=4)
    assert second.summary["student_before"]["perplexity"] == pytest.approx(
        first.summary["student"]["perplexity"], rel=1e-4
    )
    assert any("merged; a second one is trained" in note for note in notes(second.folder))
    assert json.loads((second.folder / "student" / "adapter" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] in ("", None)
    plain = tiny.settings(world, student__model=str(start), train__max_steps=2, eval__max_batches=2)
    whole = distill(load_config(overrides=plain), tmp_path / "third", device="cpu")
    assert not (whole.folder / "student" / "adapter").exists()
    assert whole.summary["student_before"] == second.summary["student_before"]


def test_a_cut_student_may_be_healed_by_an_adapter(world: Path, tmp_path: Path) -> None:
    over = {"student__init": "shrink", "student__shrink__layers": 1, "student__shrink__method": "even"}
    result = run(world, tmp_path / "run", **over)
    assert result.summary["student"]["perplexity"] < result.summary["student_before"]["perplexity"]
    assert any("cut from the teacher" in note for note in notes(result.folder))


def test_a_base_without_trained_weights_is_named_as_such(world: Path, tmp_path: Path) -> None:
    result = run(world, tmp_path / "run", student__init="random", train__max_steps=2)
    assert any("drawn at random and stays so" in note for note in notes(result.folder))
