"""Laws of the adapter for transformers' Trainer: its loss is the engine's, in any wrapper and micro-batch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from process_jobs import alone, group
from refusals import refused
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import stillroom
from stillroom.core.errors import ConfigError
from stillroom.hf import DistillTrainer, as_loss
from stillroom.telemetry import read_events

ROWS, LENGTH = 8, 32


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


class Collator:
    """Pads with token 0 and labels of -100; tokens that end a text are labels."""

    side = "right"

    def __call__(self, features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(one["input_ids"]) for one in features)
        padded: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for one in features:
            ids, gap = one["input_ids"], longest - len(one["input_ids"])
            own_of = {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}
            for name, own in own_of.items():
                fill = [-100 if name == "labels" else 0] * gap
                padded[name].append([*own, *fill] if self.side == "right" else [*fill, *own])
        return {name: torch.tensor(value) for name, value in padded.items()}


def rows(world: Path) -> tuple[list[str], Dataset, Collator]:
    """Texts, the same as token ids of various lengths with their end, and a collator."""
    lines = (world / "train.jsonl").read_text(encoding="utf-8").splitlines()[:ROWS]
    tokenizer = AutoTokenizer.from_pretrained(world / "teacher")
    ids = [tokenizer(json.loads(line)["text"])["input_ids"][: LENGTH - 2 - place] for place, line in enumerate(lines)]
    texts = [tokenizer.decode(one) for one in ids]
    return texts, Dataset.from_dict({"input_ids": [[*one, tokenizer.eos_token_id] for one in ids]}), Collator()


def arguments(folder: Path, **over: Any) -> TrainingArguments:
    plain: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": ROWS, "max_steps": 1, "learning_rate": 1e-3,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(**plain | over)


def first_entry(trainer: Trainer) -> dict[str, float]:
    trainer.train()
    return next(entry for entry in trainer.state.log_history if "loss" in entry)


SETTINGS = {"kd.weight": 0.7, "ce.weight": 0.3, "kd.divergence": "jsd", "kd.temperature": 2.0}
# How the engine makes rows of the same tokens.
PLAIN = {"data.packing": "rows", "data.max_length": LENGTH, "data.bos": False}


def test_its_loss_is_the_engine_s_on_the_same_batch(world: Path, tmp_path: Path) -> None:
    texts, data, collator = rows(world)
    result = stillroom.distill(
        teacher=str(world / "teacher"), student=str(world / "student"), data=texts, eval_data=texts,
        out=tmp_path / "engine", device="cpu",
        settings={
            **{f"objectives.{key}": value for key, value in SETTINGS.items()}, **PLAIN, "train.max_steps": 1,
            "train.batch_size": ROWS, "eval.samples": 0, "train.learning_rate": 1e-3, "precision.mode": "fp32",
        },
    )  # fmt: skip
    (step,) = [event for event in read_events(result.folder / "events.jsonl") if event["event"] == "step"]
    trainer = DistillTrainer(
        model=load(world / "student"), args=arguments(tmp_path / "hf"), train_dataset=data, data_collator=collator,
        teacher=load(world / "teacher"), objectives=SETTINGS,
    )  # fmt: skip
    found = first_entry(trainer)
    assert step["tokens"] == sum(len(ids) - 1 for ids in data["input_ids"]), "the same positions are scored"
    assert found["loss"] == pytest.approx(step["train_loss"], rel=1e-5)
    for term in ("kd", "ce"):
        assert found[term] == pytest.approx(step["terms"][term]["raw"], rel=1e-5)
    assert found["bad_teacher_rows"] == 0
    assert found["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-4)


def train(world: Path, folder: Path, kind: str, **over: Any) -> dict[str, torch.Tensor]:
    _, data, collator = rows(world)
    student = load(world / "student")
    common: dict[str, Any] = {"args": arguments(folder, max_steps=2, **over), "train_dataset": data}
    common |= {"data_collator": collator}
    if kind == "trainer":
        DistillTrainer(model=student, teacher=str(world / "teacher"), objectives=SETTINGS, **common).train()
    else:
        loss = as_loss(student, load(world / "teacher"), objectives=SETTINGS)
        Trainer(model=student, compute_loss_func=loss, **common).train()
    return {name: value.detach().clone() for name, value in student.state_dict().items()}


def are_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-4, atol=5e-6) for name in one)


def test_eight_micro_batches_equal_one_and_the_bare_loss_equals_the_trainer(world: Path, tmp_path: Path) -> None:
    whole = train(world, tmp_path / "a", "trainer")
    parts = train(world, tmp_path / "b", "trainer", per_device_train_batch_size=1, gradient_accumulation_steps=ROWS)
    assert are_close(whole, parts) and are_close(whole, train(world, tmp_path / "c", "bare"))
    assert not are_close(whole, load(world / "student").state_dict()), "something was trained"


def test_two_processes_equal_one_in_weights_and_in_every_number_of_the_log(world: Path, tmp_path: Path) -> None:
    def train_part() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # a fork of these tests has that of one process
        size = int(os.environ.get("WORLD_SIZE", "1"))
        _, data, collator = rows(world)
        trainer = DistillTrainer(
            model=load(world / "student"), teacher=load(world / "teacher"), objectives=SETTINGS,
            args=arguments(tmp_path / f"of-{size}", max_steps=2, per_device_train_batch_size=ROWS // size),
            train_dataset=data, eval_dataset=data, data_collator=collator,
        )  # fmt: skip
        trainer.train()
        found = [*trainer.state.log_history[:2], trainer.evaluate()]
        ours = ("loss", "grad_norm", "kd", "ce", "bad_teacher_rows", "eval_kd", "eval_ce", "eval_bad_teacher_rows")
        kept = [{name: one[name] for name in ours if name in one} for one in found]
        if trainer.is_world_process_zero():
            torch.save((kept, trainer.accelerator.unwrap_model(trainer.model).state_dict()), tmp_path / f"{size}.pt")

    alone(train_part)
    group(2, train_part)
    (told, weights), (told_by_two, weights_of_two) = (torch.load(tmp_path / f"{size}.pt") for size in (1, 2))
    assert [sorted(entry) for entry in told] == [["bad_teacher_rows", "ce", "grad_norm", "kd", "loss"]] * 2 + [
        ["eval_bad_teacher_rows", "eval_ce", "eval_kd"]  # eval_loss is the Trainer's mean over means of batches
    ]
    for entry, entry_of_two in zip(told, told_by_two, strict=True):
        assert entry_of_two == pytest.approx(entry, rel=1e-5)
    assert are_close(weights, weights_of_two)


def test_a_cache_answers_for_the_teacher_by_the_content_of_rows(world: Path, tmp_path: Path) -> None:
    texts, data, collator = rows(world)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    names = {"teacher.model": str(world / "teacher"), "student.model": str(world / "student")}
    plain = {**names, **PLAIN, "data.train": str(path), "data.eval": str(path), "objectives.kd.top_k": 8}
    stillroom.write_cache(stillroom.load_config(overrides=plain), tmp_path / "cache", device="cpu")
    entries = {}
    for name, given in {"cache": {"cache": tmp_path / "cache"}, "live": {"teacher": load(world / "teacher")}}.items():
        objectives = {"kd.temperature": 1.0} | ({"kd.top_k": 8} if name == "live" else {})
        trainer = DistillTrainer(
            model=load(world / "student"), args=arguments(tmp_path / name), train_dataset=data,
            data_collator=collator, objectives=objectives, **given,
        )  # fmt: skip
        entries[name] = first_entry(trainer)
    assert entries["cache"]["bad_teacher_rows"] == 0
    other = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]]})
    with refused(ConfigError, "cache"):
        DistillTrainer(
            model=load(world / "student"), args=arguments(tmp_path / "other"), train_dataset=other,
            data_collator=collator, objectives={"kd.temperature": 1.0}, cache=tmp_path / "cache",
        ).train()  # fmt: skip
    assert entries["cache"]["loss"] == pytest.approx(entries["live"]["loss"], rel=2e-3)  # stored in half precision


def test_trl_s_trainer_takes_the_loss(world: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    student = load(world / "student")
    args = trl.SFTConfig(
        output_dir=str(tmp_path / "sft"), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        save_strategy="no", logging_steps=1, disable_tqdm=True, max_length=LENGTH, bf16=False,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=student, args=args, train_dataset=Dataset.from_dict({"text": rows(world)[0]}),
        processing_class=AutoTokenizer.from_pretrained(world / "teacher"),
        compute_loss_func=as_loss(student, load(world / "teacher")),
    )  # fmt: skip
    trainer.train()
    assert [entry["loss"] > 0 for entry in trainer.state.log_history if "loss" in entry] == [True, True]


def test_trl_s_trainer_with_ours_in_front_prepares_the_data_and_has_our_loss(world: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")

    class DistillSFT(DistillTrainer, trl.SFTTrainer):  # type: ignore[misc, name-defined]
        pass

    args = trl.SFTConfig(
        output_dir=str(tmp_path / "sft"), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", logging_steps=1, disable_tqdm=True, max_length=LENGTH, bf16=False, eval_strategy="steps",
        eval_steps=2, gradient_accumulation_steps=2,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": text[:20], "completion": text[20:]} for text in rows(world)[0]])
    trainer = DistillSFT(
        model=str(world / "student"), args=args, train_dataset=data, eval_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(world / "teacher"), teacher=str(world / "teacher"),
    )  # fmt: skip
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 2 and all(entry["loss"] == pytest.approx(entry["kd"], rel=1e-5) for entry in entries)
    (evaluated,) = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated["eval_kd"] == pytest.approx(evaluated["eval_loss"], rel=1e-5)


def test_a_peft_model_learns_and_is_evaluated_by_the_same_loss(world: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.get_peft_model(load(world / "student"), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    _, data, collator = rows(world)
    args = arguments(tmp_path / "lora", max_steps=4, eval_strategy="steps", eval_steps=4, learning_rate=1e-2)
    trainer = DistillTrainer(
        model=lora, args=args, data_collator=collator, train_dataset=data, eval_dataset=data,
        teacher=load(world / "teacher"),
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    (evaluated,) = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[-1] < losses[0] and evaluated < losses[0]


def test_terms_of_an_evaluation_are_kept_apart_from_those_of_training(world: Path, tmp_path: Path) -> None:
    """Without training the evaluation's terms are the same, and neither reaches the other's entry of the log."""
    _, data, collator = rows(world)
    args = arguments(
        tmp_path / "x", max_steps=2, logging_steps=2, eval_strategy="steps", eval_steps=1, learning_rate=0.0
    )
    trainer = DistillTrainer(
        model=load(world / "student"), args=args, train_dataset=data.select(range(4)), data_collator=collator,
        eval_dataset=data.select(range(4, ROWS)), teacher=load(world / "teacher"),
    )  # fmt: skip
    trainer.train()
    (step,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert step["kd"] == pytest.approx(step["loss"], rel=1e-5)
    assert len(evaluations) == 2 and step["loss"] != pytest.approx(evaluations[0]["eval_loss"], rel=1e-3)
    for entry in (*evaluations, trainer.evaluate()):
        assert entry["eval_kd"] == pytest.approx(entry["eval_loss"], rel=1e-5) and "kd" not in entry
        assert entry["eval_bad_teacher_rows"] == 0
    assert "test_kd" in trainer.predict(data).metrics


def test_a_model_without_a_causal_loss_of_transformers_has_the_mean_over_scored_tokens(
    world: Path, tmp_path: Path
) -> None:
    """Of GPT-2 a Trainer counts the first token of each row too, which nothing predicts."""
    teacher, (_, data, collator) = load(world / "teacher"), rows(world)
    student = GPT2LMHeadModel(GPT2Config(vocab_size=teacher.config.vocab_size, n_embd=8, n_layer=1, n_head=2))
    found = first_entry(
        DistillTrainer(
            model=student, args=arguments(tmp_path), train_dataset=data, data_collator=collator, teacher=teacher
        )
    )
    assert found["loss"] == pytest.approx(found["kd"], rel=1e-5)


def test_a_teacher_may_have_an_adapter(world: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    _, data, collator = rows(world)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(load(world / "teacher"), lora)
    losses = {}
    for name in ("adapted", "merged", "bare"):
        teacher = {"adapted": adapted, "merged": adapted, "bare": load(world / "teacher")}[name]
        losses[name] = first_entry(
            DistillTrainer(
                model=load(world / "student"), args=arguments(tmp_path / name), train_dataset=data,
                data_collator=collator, teacher=teacher.merge_and_unload() if name == "merged" else teacher,
            )
        )["loss"]  # fmt: skip
    assert losses["adapted"] == pytest.approx(losses["merged"], rel=1e-5) != losses["bare"]


def test_what_it_cannot_do_is_refused_by_name(world: Path, tmp_path: Path) -> None:
    _, data, collator = rows(world)
    student, teacher = load(world / "student"), load(world / "teacher")

    def made(**over: Any) -> DistillTrainer:
        given: dict[str, Any] = {"model": student, "args": arguments(tmp_path / "x"), "train_dataset": data}
        return DistillTrainer(**given | {"data_collator": collator, "teacher": teacher} | over)

    with refused(ConfigError, "teacher"):
        made(teacher=None)
    with refused(ConfigError, "DistillTrainer", "compute_metrics"):
        made(compute_metrics=lambda _found: {})
    with refused(ConfigError, "DistillTrainer", "label_smoothing_factor"):
        made(args=arguments(tmp_path / "x", label_smoothing_factor=0.1))
    with refused(ConfigError, "teacher", "int"):
        made(teacher=42)
    with refused(ConfigError, "teacher", "one object"):
        made(teacher=student)
    with refused(ConfigError, "data collator", "labels"):
        made(data_collator=default_data_collator, train_dataset=data.select(range(1))).train()
    with refused(ConfigError, "objectives", "hidden"):
        made(objectives={"hidden.weight": 1.0})
    with refused(ConfigError, "objectives", "ramp"):
        as_loss(student, teacher, objectives={"ce.weight": {"start": 0.0, "end": 1.0}})
    collator.side = "left"
    with refused(ConfigError, "data collator", "padding_side"):
        made().train()
    collator.side = "right"
    peft = pytest.importorskip("peft")
    with refused(ConfigError, "model", "virtual tokens"):
        made(model=peft.get_peft_model(student, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)))
    smaller = load(world / "teacher")
    smaller.resize_token_embeddings(100)
    with refused(ConfigError, "teacher", "100"):
        made(teacher=smaller).train()
