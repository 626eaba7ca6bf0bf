"""Problems to plant for the doctor: each is really there, in a configuration, on a disk or in a machine's facts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
import torch
from damage import rewrite
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stillroom.doctor.setup import Machine
from stillroom.precision.device import DeviceFacts

GB = 1_000_000_000
MACHINE = Machine(
    device=DeviceFacts("cpu", "CPU"), num_cores=2, load=0.5, num_threads=2, asked_threads="", free_memory=8 * GB,
    total_memory=16 * GB, free_device_memory=8 * GB, free_disk=50 * GB, driver="", torch_cuda="",
)  # fmt: skip
T4 = DeviceFacts("cuda", "Tesla T4", False, 16 * GB, "sm_75", ("sm_70", "sm_75"))
VOLTA = DeviceFacts("cuda", "Tesla V100", False, 16 * GB, "sm_70", ("sm_75", "sm_80", "sm_90", "sm_120"))
PASCAL = DeviceFacts("cuda", "Tesla P100", False, 16 * GB, "sm_60", ("sm_70", "sm_75"), has_tensor_cores=False)


@dataclass(frozen=True)
class Plant:
    """`settings` with __ for dots; `machine` replaces facts; `prepare` changes a copy of the world."""

    name: str
    subject: str
    level: str
    cause: str  # the code of the rule, or the class of the error
    words: tuple[str, ...] = ()  # of an error, whose class says little
    settings: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Path], dict[str, Any] | None] = lambda _place: None


def amber(name: str, subject: str, cause: str = "", *words: str, **options: Any) -> Plant:
    return Plant(name, subject, "amber", cause, words, **options)


def red(name: str, subject: str, cause: str = "", *words: str, **options: Any) -> Plant:
    return Plant(name, subject, "red", cause, words, **options)


SETTINGS = [
    amber("logits are clamped", "configuration", "clamped_logits", settings={"guard__logit_clamp": 2.5}),
    amber("the loss is clamped", "configuration", "clamped_loss", settings={"guard__loss_clamp": 5.0}),
    amber("the guard lets all pass", "configuration", "lax_guard", settings={"guard__max_skip_share": 0.9}),
    amber("temperature 10", "configuration", "temperature_too_high", settings={"objectives__kd__temperature": 10.0}),
    amber("temperature 0.1", "configuration", "temperature_too_low", settings={"objectives__kd__temperature": 0.1}),
    amber("hardly any teacher", "configuration", "hardly_distils",
          settings={"objectives__kd__weight": 0.05, "objectives__ce__weight": 0.95}),
    amber("renormalised answers", "configuration", "biased_signal", settings={"teacher__signal__kind": "renormalised"}),
    amber("contrast of one row", "configuration", "dead_component",
          settings={"objectives__contrastive__weight": 0.1, "train__batch_size": 1}),
    amber("a rate of 0.5", "configuration", "rate_too_high", settings={"train__learning_rate": 0.5}),
    amber("a pretrained student at 0.01", "configuration", "rate_too_high",
          settings={"train__learning_rate": 0.01, "student__init": "pretrained"}),
    amber("betas that bound nothing", "configuration", "unbounded_steps", settings={"train__beta2": 0.5}),
    amber("all is clipped", "configuration", "clipped_to_nothing", settings={"train__max_grad_norm": 1e-4}),
    amber("a large epsilon", "configuration", "large_epsilon", settings={"train__epsilon": 1e-3}),
    amber("warm-up for most of the run", "configuration", "never_out_of_warmup", settings={"train__warmup_ratio": 0.8}),
    amber("a rate that FP16 cannot follow", "configuration", "noop_updates",
          settings={"train__learning_rate": 1e-7, "precision__mode": "fp16-sr"}),
    red("draws for reverse KL", "configuration", "impossible_estimate",
        settings={"objectives__kd__divergence": "reverse_kl", "teacher__signal__kind": "hybrid"}),
    red("bf16 on a T4", "configuration", "ConfigError", "no native bf16", settings={"precision__mode": "bf16-mixed"},
        machine={"device": T4}),
    amber("teacher and student are one model", "configuration", "same_model",
          prepare=lambda place: {"student__model": str(place / "teacher")}),
    red("evaluation on the training data", "configuration", "leaking_data",
        prepare=lambda place: {"data__eval": str(place / "train.jsonl")}),
    amber("gates that follow the student alone", "configuration", "gates_follow_the_student",
          settings={"teacher__router__mode": "sar", "teacher__router__truth_weight": 0.0,
                    "teacher__router__anchor_weight": 0.0}),
]  # fmt: skip

MACHINES = [
    red("a card torch was not built for", "machine", "BrokenAtStart", "sm_60", machine={"device": PASCAL}),
    red("a V100 and wheels of CUDA 13", "machine", "BrokenAtStart", "sm_70", machine={"device": VOLTA}),
    amber("a CPU build beside a card", "machine", "cpu_build", machine={"driver": "NVRM version: 570"}),
    red(
        "a driver older than the wheel",
        "machine",
        "driver_too_old",
        machine={"driver": "NVRM version: 550", "torch_cuda": "13.0"},
    ),
    amber(
        "two GPUs and docker's shared memory",
        "machine",
        "small_shared_memory",
        machine={"num_gpus": 2, "shared_memory": 64 * 2**20},
    ),
    red("a full disk", "machine", "disk_full", machine={"free_disk": GB // 100}),
    red("no memory", "machine", "memory_full", machine={"free_memory": GB // 10}),
    amber("a busy machine", "machine", "busy_machine", machine={"load": 9.0}),
    amber("more threads than cores", "machine", "too_many_threads", machine={"num_threads": 16}),
    amber("idle cores", "machine", "idle_cores", machine={"num_threads": 1, "num_cores": 8, "asked_threads": "1"}),
    red("models that do not fit", "models", "memory_short", machine={"free_device_memory": 9000}),
    red("checkpoints that do not fit", "models", "disk_short", machine={"free_disk": 10_000}),
]


# -- on the disk -----------------------------------------------------------------------------------------


def _without(name: str) -> Callable[[Path], None]:
    return lambda place: (place / "teacher" / name).unlink()


def _shards(place: Path) -> None:
    folder = place / "teacher"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    table = dict.fromkeys(tensors, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def _pickled(place: Path) -> None:
    (place / "teacher" / "model.safetensors").rename(place / "teacher" / "pytorch_model.bin")


def _cut_short(place: Path) -> None:
    path = place / "teacher" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])


def _nan(place: Path) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")

    rewrite(place / "student", spoil)


def _more_tokens(place: Path) -> None:
    for role in ("teacher", "student"):
        found = tiny.tokenizer()
        found.add_tokens([f"<extra{number}>" for number in range(9)])
        found.save_pretrained(place / role)


def _bf16(place: Path) -> dict[str, Any]:
    path = place / "teacher" / "model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return {"teacher__dtype": "float16"}


def _swapped(place: Path) -> dict[str, Any]:
    return {"teacher__model": str(place / "student"), "student__model": str(place / "teacher")}


MODELS = [
    red("no config.json", "models", "BrokenAtStart", "has no config.json", prepare=_without("config.json")),
    red("a missing shard", "models", "BrokenAtStart", "lacks 1 of 1 shards", prepare=_shards),
    red("pickled weights", "models", "BrokenAtStart", "is a pickle", prepare=_pickled),
    red("a file that was cut short", "models", "BrokenAtStart", "is damaged", prepare=_cut_short),
    red("a NaN weight", "models", "BrokenAtStart", "not finite", prepare=_nan),
    red("tokens without embeddings", "models", "ConfigError", "token id", prepare=_more_tokens),
    red("rows longer than the positions", "models", "rows_too_long", settings={"data__max_length": 512}),
    red("gates of a dense teacher", "models", "BrokenAtStart", "no gate", settings={"teacher__router__mode": "sar"}),
    amber("a bf16 teacher in float16", "models", "bf16_read_as_fp16", prepare=_bf16),
    amber("a student larger than its teacher", "models", "student_is_larger", prepare=_swapped),
    red("four bits on a CPU", "models", "BrokenAtStart", "CUDA", settings={"teacher__quantisation": "bnb-4bit"}),
    red("no such folder", "models", "BrokenAtStart", "no model folder", settings={"teacher__model": "./nosuch"}),
]


# -- tokenizers and data ---------------------------------------------------------------------------------


def _other_tokenizer(place: Path) -> None:
    tiny.tokenizer(seed=9).save_pretrained(place / "student")


def _word_tokenizer(place: Path) -> None:
    raw = Tokenizer(models.WordLevel({"<unk>": 0, "<|end|>": 1, "the": 2, "room": 3}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    found = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", unk_token="<unk>")
    for role in ("teacher", "student"):
        shutil.copytree(place / role, place / "old" / role)
        for path in (place / role).glob("token*"):
            path.unlink()
        found.save_pretrained(place / role)


def _no_end(place: Path) -> None:
    for role in ("teacher", "student"):
        found = PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer().backend_tokenizer)
        for path in (place / role).glob("*token*"):
            path.unlink()
        found.save_pretrained(place / role)


def _lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records))


def _texts(count: int = 300) -> list[Any]:
    return [{"text": line} for line in tiny.sentences(count, 0)]


def _data(make: Callable[[], list[Any]], **over: Any) -> Callable[[Path], dict[str, Any]]:
    def prepare(place: Path) -> dict[str, Any]:
        _lines(place / "train.jsonl", make())
        return over

    return prepare


def _held_out(place: Path) -> dict[str, Any]:
    _lines(place / "eval.jsonl", _texts(300)[:20])
    return {"data__eval": str(place / "eval.jsonl")}


def _chats() -> list[Any]:
    turns = [{"role": "user", "content": "what drips?"}, {"role": "assistant", "content": "the still room."}]
    return [{"messages": [{**turns[0], "content": f"{line}?"}, turns[1]]} for line in tiny.sentences(100, 0)]


def _pairs(prompt: str, answer: str, count: int = 100) -> list[Any]:
    return [{"prompt": f"{line} {prompt}", "completion": f" {answer}"} for line in tiny.sentences(count, 0)]


TEXTS = [
    red("two vocabularies", "tokenizers", "ConfigError", "different vocabularies", prepare=_other_tokenizer),
    red("a tokenizer that knows no word", "tokenizers", "unknown_tokens", prepare=_word_tokenizer),
    amber("no end of text", "tokenizers", "no_end_of_text", prepare=_no_end),
    amber("garbled text", "tokenizers", "short_tokens",
          prepare=_data(lambda: [{"text": "".join(chr(0x3400 + 7 * i + j) for j in range(60))} for i in range(99)])),
    red("no such file", "data", "DataError", "nosuch.jsonl", settings={"data__train": "nosuch.jsonl"}),
    red("mostly bad lines", "data", "DataError", "cannot be used",
        prepare=_data(lambda: [*_texts(20), *["{broken"] * 30])),
    amber("a few bad lines", "data", "bad_lines",
          prepare=_data(lambda: [*_texts(400), "{broken", "7"])),
    amber("chats without a template", "data", "no_chat_template", prepare=_data(_chats)),
    amber("little is scored", "data", "masked_out_data",
          prepare=_data(lambda: _pairs("and what is left behind when the best has gone over? " * 6, "x"),
                        data__max_length=120)),
    red("held-out records that are trained on", "data", "leaking_data", prepare=_held_out),
    amber("copies of one record", "data", "many_copies", prepare=_data(lambda: [*_texts(50), *_texts(1) * 60])),
    amber("records that are cut", "data", "records_cut",
          prepare=_data(lambda: _pairs("and then", "the room keeps waters and spirits " * 9))),
    amber("much padding", "data", "much_padding",
          prepare=_data(lambda: [*_pairs("", "x", 90), *_pairs("so " * 40, "it drips " * 30, 5)],
                        data__max_length=128, data__packing="rows")),
    red("a warm-up as long as the run", "data", "never_out_of_warmup",
        settings={"train__max_steps": 0, "train__warmup_steps": 5000}),
    amber("eight steps", "data", "few_steps"),
    amber("a text seen a hundred times", "data", "data_exhausted", settings={"train__max_steps": 20_000}),
    amber("a step larger than the data", "data", "step_of_all_rows",
          settings={"train__gradient_accumulation_steps": 5000}),
    amber("hardly any held-out text", "data", "few_held_out", prepare=_data(lambda: _texts(12))),
    amber("empty answers", "data", "empty_answers",
          prepare=_data(lambda: [*_chats(), {"messages": [{"role": "user", "content": "and?"},
                                                          {"role": "assistant", "content": ""},
                                                          {"role": "user", "content": "well?"},
                                                          {"role": "assistant", "content": "it drips."}]}])),
]  # fmt: skip


def _loud_teacher(place: Path) -> dict[str, Any]:
    def spoil(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith(("down_proj.weight", "o_proj.weight")):
                tensors[name] *= 3e5

    rewrite(place / "teacher", spoil)
    return {"teacher__dtype": "float16"}


def _loud_student(place: Path) -> dict[str, Any]:
    """Sound in FP32; FP16 cannot hold its weights."""

    def spoil(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"] *= 1e7

    rewrite(place / "student", spoil)
    return {"precision__mode": "fp16-mixed"}


STEPS = [
    red("a loss that is always cut", "real step", "zero_gradients",
        settings={"guard__loss_clamp": 0.001}),
    red("a student that overflows in FP16", "real step", "step_not_finite",
        prepare=_loud_student),
    red("a teacher that overflows in FP16", "models", "BrokenAtStart", "not finite", prepare=_loud_teacher),
]  # fmt: skip

PLANTS = [*SETTINGS, *MACHINES, *MODELS, *TEXTS, *STEPS]
