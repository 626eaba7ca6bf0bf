"""A teacher, a student and random text of any size, saved as a user would have them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Size:
    """What a training step costs depends on these."""

    vocabulary: int = 32_000
    length: int = 256
    batch: int = 8
    teacher_layers: int = 8
    teacher_width: int = 512
    student_layers: int = 4
    student_width: int = 256
    is_tied: bool = False

    @property
    def tokens(self) -> int:
        return self.length * self.batch


def _model(layers: int, width: int, size: Size) -> Any:
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=max(1024, size.length),
        tie_word_embeddings=size.is_tied,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    return AutoModelForCausalLM.from_config(config)


def make_world(folder: Path, size: Size, num_rows: int = 64) -> Path:
    """Folders `teacher` and `student` and a text of one-word tokens, drawn at random."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size.vocabulary)}, unk_token="t1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0", pad_token="t1", unk_token="t1")
    for name, layers, width in (
        ("teacher", size.teacher_layers, size.teacher_width),
        ("student", size.student_layers, size.student_width),
    ):
        _model(layers, width, size).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rng = random.Random(0)
    # One document is one row with its target; a token more than a row holds ends up in the next.
    lines = (" ".join(f"t{rng.randrange(2, size.vocabulary)}" for _ in range(size.length + 1)) for _ in range(num_rows))
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines) + "\n")
    return folder


def settings(folder: Path, size: Size, steps: int = 1000) -> dict[str, Any]:
    """Dotted overrides for a Stillroom run on that world: forward KL at T = 1 alone, as trl's loss is."""
    return {
        "teacher.model": str(folder / "teacher"),
        "student.model": str(folder / "student"),
        "data.train": str(folder / "train.jsonl"),
        "data.eval_share": 0.1,
        "data.max_length": size.length,
        "train.batch_size": size.batch,
        "train.max_steps": steps,
        "train.learning_rate": 1e-4,
        "train.weight_decay": 0.0,
        "train.max_grad_norm": 1.0,
        "objectives.kd.weight": 1.0,
        "objectives.ce.weight": 0.0,
        "objectives.kd.temperature": 1.0,
    }
