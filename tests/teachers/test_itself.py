"""Laws of a student that teaches itself: without its adapter, or by an average of its weights; and of contexts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stillroom.config import load_config
from stillroom.core.errors import CheckpointUnusable, ConfigError, DataError
from stillroom.core.types import Batch, DenseSignal, Needs
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume
from stillroom.training.evaluate import evaluate
from stillroom.training.run import RunState
from stillroom.training.step import attempt, train_step
from stillroom.training.write_cache import make_cache

PREFIX = "the maid who keeps the room: "
SELF = {"teacher__model": "self", "student__adapter__rank": 4, "student__adapter__targets": ["q_proj", "up_proj"]}
EMA = {"teacher__model": "ema", "teacher__ema_decay": 0.9}
MIXED = {"objectives__kd__weight": 0.5, "objectives__ce__weight": 0.5}


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    records = [{"prompt": text[:20], "completion": text[20:]} for text in tiny.sentences(60, 5)]
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return str(path)


def logits_of(signal: Any) -> torch.Tensor:
    assert isinstance(signal, DenseSignal)
    return signal.hidden @ signal.head.weight.T


def by_hand(model: Any, rows: list[list[int]], targets: torch.Tensor) -> torch.Tensor:
    """The logits before each target of rows that end with their targets."""
    with torch.no_grad():
        found = [model(input_ids=torch.tensor([row])).logits[0] for row in rows]
    counts = [int((own != -100).sum()) for own in targets]
    return torch.cat(
        [logits[len(row) - count : len(row)] for logits, row, count in zip(found, rows, counts, strict=True)]
    )


def unpadded(batch: Batch) -> list[list[int]]:
    return [row[mask == 1].tolist() for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]


def train(run: Any, num_steps: int, state: RunState | None = None) -> RunState:
    state = state or RunState()
    for _ in range(num_steps):
        train_step(run, state, run.loader.window(state.cursor))
    return state


def test_the_base_answers_after_its_context_as_a_second_model_does(make_run: Any, world: Path, prompts: str) -> None:
    """Two models by hand: the base as it was saved, on rows that were put together here, and the student."""
    run = make_run(data__train=prompts, data__teacher_prefix=PREFIX, **SELF, objectives__ce__weight=0.0)
    assert run.teacher.as_model().model is run.student.model, "no second copy"
    train(run, 3)
    base = AutoModelForCausalLM.from_pretrained(world / "student").eval()
    words, batch = run.tokenizer, run.loader.window(5)[0]
    texts = [
        words.decode(row[mask == 1].tolist()) for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]
    rows = []
    for text, row, mask, own in zip(texts, batch.input_ids, batch.attention_mask, batch.targets, strict=True):
        prompt, ids = text[:20], row[mask == 1].tolist()
        assert words(prompt)["input_ids"] == ids[: len(words(prompt)["input_ids"])]
        rows.append([*words(PREFIX + prompt)["input_ids"], *ids[len(words(prompt)["input_ids"]) :]])
        assert int((own != -100).sum()) == len(ids) - len(words(prompt)["input_ids"]) + 1
    asked = logits_of(run.teacher.observe(batch, Needs()))
    assert torch.allclose(asked, by_hand(base, rows, batch.targets), atol=1e-6, rtol=1e-6)
    # The student's own answer is that of the adapted network, untouched by the question.
    plain = [row[mask == 1].tolist() for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    with torch.no_grad():
        view = run.student.observe(batch, Needs())
    assert torch.allclose(
        view.hidden @ view.head.weight.T, by_hand(run.student.model.eval(), plain, batch.targets), atol=1e-5
    )
    assert not torch.allclose(asked, by_hand(base, plain, batch.targets), atol=1e-3)


def test_asking_the_base_leaves_the_student_as_it_was(make_run: Any) -> None:
    run = make_run(**SELF, **MIXED, student__adapter__dropout=0.2)
    train(run, 2)
    flags = {name: one.requires_grad for name, one in run.student.model.named_parameters()}
    before = copy.deepcopy(run.student.model.state_dict())
    with run.teacher.at_work(), run.teacher.at_work():
        assert not run.student.model.training, "dropout is off"
    first, second = (logits_of(run.teacher.observe(run.loader.window(0)[0], Needs())) for _ in range(2))
    assert torch.equal(first, second)
    assert run.student.model.training
    assert flags == {name: one.requires_grad for name, one in run.student.model.named_parameters()}
    assert all(torch.equal(before[name], one) for name, one in run.student.model.state_dict().items())
    with run.teacher.at_work():
        inside = evaluate(run.teacher.as_model(), run.eval_batches(), precision=run.precision, teacher=run.teacher)
    assert inside.kl == pytest.approx(0.0, abs=1e-9), "asked from inside, it is still the base"


def test_a_teacher_with_a_context_is_any_teacher_on_other_rows(make_run: Any, world: Path) -> None:
    run = make_run(data__teacher_prefix=PREFIX)
    plain = make_run(data__packing="rows")
    batch = run.loader.window(0)[0]
    assert torch.equal(batch.input_ids, plain.loader.window(0)[0].input_ids)
    network = AutoModelForCausalLM.from_pretrained(world / "teacher").eval()
    prefix = run.tokenizer(PREFIX)["input_ids"]
    rows = [[*prefix, *ids] for ids in unpadded(batch)]
    assert torch.allclose(
        logits_of(run.teacher.observe(batch, Needs())), by_hand(network, rows, batch.targets), atol=1e-5
    )
    evidence, _ = attempt(run, RunState(), run.loader.window(0))
    other, _ = attempt(plain, RunState(), plain.loader.window(0))
    assert evidence.num_targets == other.num_targets and evidence.loss != other.loss


def test_a_cache_is_that_of_its_context(make_run: Any, world: Path, tmp_path: Path, prompts: str) -> None:
    over = {"data__train": prompts, "data__teacher_prefix": PREFIX, "teacher__signal__kind": "top_k"}
    over["teacher__signal__k"] = 320
    make_cache(load_config(overrides=tiny.settings(world, **over)), tmp_path / "cache", device="cpu")
    runs = [make_run(**over), make_run(**over, teacher__cache=str(tmp_path / "cache"))]
    live, stored = (attempt(run, RunState(), run.loader.window(0))[0].loss for run in runs)
    assert stored == pytest.approx(live, rel=1e-3), "to a step of what is stored"
    with refused(DataError, "teacher.cache", "stillroom cache"):
        make_run(**{**over, "data__teacher_prefix": "keep: "}, teacher__cache=str(tmp_path / "cache"))


@pytest.mark.parametrize("adapter", [{}, {"student__adapter__rank": 4}])
def test_the_average_is_that_of_the_applied_steps(make_run: Any, adapter: dict[str, int]) -> None:
    run = make_run(**EMA, **MIXED, **adapter)
    trained = {name: one for name, one in run.student.model.named_parameters() if one.requires_grad}
    expected = {name: one.detach().double().clone() for name, one in trained.items()}
    state = RunState()
    for _ in range(3):
        train(run, 1, state)
        for name, one in trained.items():
            expected[name] = 0.9 * expected[name] + 0.1 * one.detach().double()
    average = run.teacher.training.tensors()
    assert set(average) == set(expected) and all(one.dtype == torch.float32 for one in average.values())
    for name, one in average.items():
        assert torch.allclose(one.double(), expected[name], atol=1e-7)
    assert any(not torch.equal(one, trained[name]) for name, one in average.items())
    # Its answer is that of a network with these weights, also after the student has its own again.
    batch = run.loader.window(4)[0]
    signal = run.teacher.observe(batch, Needs())
    network = copy.deepcopy(run.student.model).eval()
    with torch.no_grad():
        for name, one in network.named_parameters():
            if name in average:
                one.copy_(average[name])
        expected_logits = network(input_ids=batch.input_ids).logits.reshape(-1, run.student.vocab_size)
    assert torch.allclose(logits_of(signal), expected_logits[batch.positions], atol=1e-5)
    assert not run.teacher.answers_last, "a later answer is another one"


@pytest.mark.parametrize("mode", ["bf16-mixed", "fp16-mixed", "fp16-master", "fp16-split"])
@pytest.mark.parametrize("teacher", [EMA, SELF], ids=["ema", "self"])
def test_before_the_first_step_it_answers_as_the_student_does(
    make_run: Any, teacher: dict[str, Any], mode: str
) -> None:
    run = make_run(**teacher, **MIXED, precision__mode=mode)
    batch = run.loader.window(0)[0]
    run.student.eval()
    with torch.no_grad(), run.precision.autocast():
        view = run.student.observe(batch, Needs())
    signal = run.teacher.observe(batch, Needs())
    assert torch.equal(signal.hidden, view.hidden) and torch.equal(signal.head.weight, view.head.weight)
    run.student.train()
    dtypes = {name: one.dtype for name, one in run.student.model.named_parameters()}
    assert train(run, 2).applied == 2
    assert dtypes == {name: one.dtype for name, one in run.student.model.named_parameters()}
    assert all(one.dtype == torch.float32 for one in run.teacher.training.tensors().values())


def test_a_skipped_step_leaves_the_average_bitwise_equal(make_run: Any) -> None:
    run = make_run(**EMA, **MIXED)
    state = train(run, 2)
    before = {name: one.clone() for name, one in run.teacher.training.tensors().items()}
    for parameter in run.student.model.parameters():
        parameter.register_hook(lambda gradient: gradient * float("nan"))
        break
    outcome = train_step(run, state, run.loader.window(state.cursor))
    assert outcome.verdict.action != "keep" and state.applied == 2
    assert all(torch.equal(before[name], one) for name, one in run.teacher.training.tensors().items())


@pytest.mark.parametrize("teacher", [EMA, SELF], ids=["ema", "self"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    teacher: dict[str, Any], world: Path, tmp_path: Path, prompts: str
) -> None:
    over = {**teacher, **MIXED, "data__train": prompts, "data__teacher_prefix": PREFIX, "train__save_steps": 2}
    config = load_config(overrides=tiny.settings(world, **over, train__max_steps=6))
    whole = distill(config, tmp_path / "whole", device="cpu")
    assert tiny.in_child(lambda: distill(config, tmp_path / "parts", device="cpu", inject="kill@6")) == -9
    parts = resume(tmp_path / "parts", device="cpu")
    losses = [
        [event["train_loss"] for event in read_events(one.folder / "events.jsonl") if event["event"] == "step"]
        for one in (whole, parts)
    ]
    assert losses[0] == losses[1]
    names = [sorted((one.folder / "checkpoints").glob("step-*"))[-1] for one in (whole, parts)]
    for file in ("student.safetensors", *(["router.safetensors"] if teacher is EMA else [])):
        one, other = (load_file(folder / file) for folder in names)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one), file


def test_a_rollback_returns_the_average_too(make_run: Any) -> None:
    run = make_run(**EMA, **MIXED)
    state = train(run, 2)
    saved = {name: one.clone() for name, one in run.teacher.training.tensors().items()}
    train(run, 2, state)
    run.teacher.training.load(saved, {}, keeps_history=True)
    assert all(torch.equal(saved[name], one) for name, one in run.teacher.training.tensors().items())
    with refused(CheckpointUnusable):
        run.teacher.training.load({}, {})


def test_a_teacher_that_answers_nan_is_counted(world: Path, tmp_path: Path) -> None:
    config = load_config(overrides=tiny.settings(world, **EMA, **MIXED, train__max_steps=4))
    result = distill(config, tmp_path / "run", device="cpu", inject="teacher_nan@3")
    steps = [event for event in read_events(result.folder / "events.jsonl") if event["event"] == "step"]
    assert [bool(event["bad_teacher_rows"]) for event in steps] == [False, False, True, False]


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"teacher__model": "self"}, "student.adapter"),
        ({**EMA, "teacher__cache": "auto"}, "teacher.cache"),
        ({**SELF, "teacher__dtype": "float16"}, "teacher.dtype"),
        ({**SELF, "train__strategy": "fsdp"}, "train.strategy"),
        ({**EMA, "student__quantise": "q4_0"}, "student.quantise"),
        ({**SELF, "objectives__alm__weight": 1.0, "objectives__ce__weight": 1.0}, "alm"),
        ({"data__teacher_prefix": "a", "data__train_on_prompt": True}, "data.train_on_prompt"),
        ({"data__teacher_prefix": "a", "data__packing": "blocks"}, "data.packing"),
        ({"data__teacher_prefix": "a", "objectives__feature__weight": 0.5}, "feature"),
        ({"data__teacher_prefix": "a", "rollouts__every": 2}, "rollouts"),
        ({"data__teacher_prefix": "a", "eval__select": "own_kl"}, "own_kl"),
    ],
)
def test_what_does_not_go_together_is_refused(world: Path, over: dict[str, Any], named: str) -> None:
    with refused(ConfigError, "", named):
        load_config(overrides=tiny.settings(world, **over))


def test_columns_are_refused_where_a_prefix_is(make_run: Any, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    records = [{"prompt": text[:9], "teacher_prompt": "so: ", "completion": text[9:]} for text in tiny.sentences(40, 1)]
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    make_run(data__train=str(path))
    with refused(ConfigError, "data.train", "feature"):
        make_run(data__train=str(path), objectives__feature__weight=0.5)
    make_run(data__train=str(path), objectives__kd__weight=0.0, objectives__ce__weight=1.0)


def test_rows_longer_than_the_teacher_reads_are_refused(make_run: Any, prompts: str) -> None:
    with refused(ConfigError, "data.max_length", "teacher"):
        make_run(data__train=prompts, data__teacher_prefix="the room " * 150)
