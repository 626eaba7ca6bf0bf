"""Pairs of models as shapes, and the bytes of one process by the formulas of `stillroom plan`.

Models are configurations of published sizes, built without weights. `hsdp` is fsdp with `train.shard_size` processes
in a group, those of one node.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from shapes import SMOL_135M, SMOL_360M
from transformers import DeepseekV3Config, LlamaConfig
from wire import Mesh

from stillroom.config import load_config
from stillroom.doctor.plan.plan import find_target
from stillroom.precision.gpus import find_gpu
from stillroom.training.memory import Layout, Shapes, Sharing, chosen_mode, lay_out
from stillroom.training.trace import Sizes

LLAMA_3, DEEPSEEK = 128_256, 129_280  # vocabularies
FITS = 0.95  # of a card's memory: predictions are off by a few per cent


def _llama(vocabulary: int, layers: int, width: int, mlp: int, heads: int, key_heads: int, *, is_tied: bool) -> Any:
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=8192,
        tie_word_embeddings=is_tied, bos_token_id=0, eos_token_id=0, pad_token_id=0, architectures=["LlamaForCausalLM"],
    )  # fmt: skip


@dataclass(frozen=True)
class Pair:
    name: str
    student: Any  # a configuration of transformers
    teacher: Any


def pairs(length: int) -> dict[str, Pair]:
    """SmolLM2, Llama 3 and DeepSeek-V3 by the figures of their published configurations."""
    small, large = SMOL_135M.config(length), SMOL_360M.config(length)
    for one in (small, large):
        one.architectures = ["LlamaForCausalLM"]
    one = _llama(LLAMA_3, 16, 2048, 8192, 32, 8, is_tied=True)
    three = _llama(LLAMA_3, 28, 3072, 8192, 24, 8, is_tied=True)
    eight = _llama(LLAMA_3, 32, 4096, 14336, 32, 8, is_tied=False)
    seventy = _llama(LLAMA_3, 80, 8192, 28672, 64, 8, is_tied=False)
    student = _llama(DEEPSEEK, 32, 4096, 14336, 32, 8, is_tied=False)
    mixture = DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"])  # its defaults are the 671B model's
    found = (
        Pair("135M <- 360M", small, large),
        Pair("1B <- 8B", one, eight),
        Pair("3B <- 70B", three, seventy),
        Pair("8B <- 671B MoE", student, mixture),
    )
    return {pair.name: pair for pair in found}


@dataclass(frozen=True)
class Held:
    """The bytes of a process, and the shapes of both models."""

    student: Sizes
    teacher: Sizes
    total: float
    by_part: dict[str, float]
    mode: str


class Memory:
    """Layouts of a pair on a card. What was traced once is remembered."""

    def __init__(self, pair: Pair, card: str, folder: Path, *, length: int) -> None:
        self.folder = folder / pair.name.replace(" ", "").replace("<-", "_of_")
        for name, config in (("student", pair.student), ("teacher", pair.teacher)):
            config.save_pretrained(self.folder / name)
        self.length = length
        self.target = replace(find_target(gpu=find_gpu(card)), main_memory=1 << 40)
        self.shapes = Shapes(self.target)
        self._teacher: Sizes | None = None
        self._mode = ""

    def layout(self, sharing: Sharing, *, rows: int, teacher: str) -> Layout:
        """With gradients of an earlier micro-batch: all but the largest runs have several in a step."""
        place = {"sharded": {"teacher.placement": "shard"}, "cached": {"teacher.cache": "cache"}}
        config = load_config(
            overrides={
                "teacher.model": str(self.folder / "teacher"),
                "student.model": str(self.folder / "student"),
                "data.train": "data.jsonl",
                "data.max_length": self.length,
                "train.batch_size": rows,
                "train.gradient_accumulation_steps": 2,
                **place.get(teacher, {}),
            }
        )
        self.shapes.target = replace(self.target, sharing=sharing)
        self._mode = self._mode or chosen_mode(config, self.shapes)[0]
        return lay_out(config, self.shapes, self._mode)

    @property
    def teacher(self) -> Sizes:
        if self._teacher is None:
            self._teacher = self.layout(Sharing(), rows=1, teacher="replicated").teacher
            assert self._teacher is not None
        return self._teacher

    def held(self, strategy: str, mesh: Mesh, teacher: str, *, rows: int) -> Held:
        """`teacher`: replicated, sharded or cached."""
        is_sharded = strategy in ("fsdp", "hsdp") and mesh.size > 1
        groups = mesh.inside if strategy == "hsdp" and mesh.size > 1 else 0
        sharing = Sharing(mesh.size, is_sharded, groups)
        layout = self.layout(sharing, rows=rows, teacher=teacher)
        parts = {name: float(value) for name, value in layout.device.items()}
        return Held(layout.sizes, self.teacher, float(layout.total), parts, layout.mode)
