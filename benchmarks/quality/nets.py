"""The laboratory's models: teachers trained once and kept on disk, students drawn from a seed.

Teachers have about 202,000 parameters in two layers, dense or as 8 experts of which 2 answer; the student has 21,000
in one. A teacher's answers to a set of rows are kept as its last hidden states, exact and whole: what a row's teacher
says does not depend on the student, so a sweep asks once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import texts
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from stillroom.config import Config
from stillroom.core.types import Batch, DenseSignal, HeadWeights, Needs
from stillroom.data import Loader, Rows
from stillroom.models.student import attend_causally
from stillroom.precision import AdamW, ParameterGroup, Precision, resolve
from stillroom.teachers import LiveTeacher, Teacher
from stillroom.training.schedule import Schedule

CPU = torch.device("cpu")
BALANCE_WEIGHT = 0.01  # of the load-balancing term while a mixture is trained
_TEACHER_STEPS = 4000  # 4.1 million tokens, nine tenths of the home text once
_TEACHER_RATE = 5e-3


@dataclass(frozen=True)
class Shape:
    """What a model is made of. `experts` 0 is dense."""

    layers: int
    width: int
    feed_forward: int
    head_dim: int
    experts: int = 0
    active: int = 2


STUDENT = Shape(layers=1, width=24, feed_forward=88, head_dim=12)
SHAPES = {
    "dense": Shape(layers=2, width=64, feed_forward=352, head_dim=16),
    "moe": Shape(layers=2, width=64, feed_forward=44, head_dim=16, experts=8),
    # More gates and more experts than `moe` at the same cost a token: where a router has the most to say.
    "many": Shape(layers=4, width=48, feed_forward=24, head_dim=16, experts=16),
}


@dataclass(frozen=True)
class TeacherName:
    """Which teacher: its shape and the share of the niche in what it learned from."""

    shape: str = "dense"
    niche_share: float = 0.0


def draw(shape: Shape, seed: int, vocab_size: int = texts.VOCAB, max_length: int = 2 * texts.LENGTH) -> Any:
    """A model with weights that depend on shape, sizes and seed alone."""
    shared = {
        "vocab_size": vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.width // shape.head_dim,
        "num_key_value_heads": shape.width // shape.head_dim,
        "head_dim": shape.head_dim,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not shape.experts:
            model = Qwen3ForCausalLM(Qwen3Config(**shared))
        else:
            config = Qwen3MoeConfig(
                **shared,
                moe_intermediate_size=shape.feed_forward,
                num_experts=shape.experts,
                num_experts_per_tok=shape.active,
                norm_topk_prob=True,
                router_aux_loss_coef=BALANCE_WEIGHT,
            )
            model = Qwen3MoeForCausalLM(config)
    attend_causally(model)
    return model


@functools.cache
def teacher_model(name: TeacherName) -> Any:
    """The trained teacher of that name, frozen; made on first use."""
    recipe = {"name": asdict(name), "shape": asdict(SHAPES[name.shape]), "steps": _TEACHER_STEPS, "rate": _TEACHER_RATE}
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    folder = texts.CACHE / f"teacher-{name.shape}-{key}"
    if not (folder / "recipe.json").exists():
        model = draw(SHAPES[name.shape], seed=1)
        seconds = train_teacher(model, _teacher_rows(name.niche_share))
        model.save_pretrained(folder)
        (folder / "recipe.json").write_text(json.dumps({**recipe, "cpu_seconds": seconds}, indent=1))
    return reopened(folder).requires_grad_(False).eval()


def reopened(folder: Path) -> Any:
    """A model kept on disk, with weights to train."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    attend_causally(model)
    return model


def _teacher_rows(niche_share: float) -> list[tuple[Rows, int]]:
    """The sets a teacher's batch is drawn from, and rows of each in a batch."""
    num_niche = round(texts.BATCH * niche_share)
    sets = [(texts.domain("python").train, texts.BATCH - num_niche), (texts.domain("cpp").train, num_niche)]
    return [(rows, count) for rows, count in sets if count]


def train_teacher(model: Any, sets: list[tuple[Rows, int]], steps: int = _TEACHER_STEPS) -> float:
    """Cross-entropy as the model computes it, with its load-balancing term; the product's optimizer and schedule."""
    train = {"learning_rate": _TEACHER_RATE, "max_steps": steps, "warmup_ratio": 0.05, "weight_decay": 0.1}
    config = Config(train=train)
    precision = resolve("fp32")
    optimizer = optimizer_of(model, precision, config)
    schedule = Schedule.of(config, 1)
    loaders = [Loader(rows, batch_size=count, seed=0) for rows, count in sets]
    extra = {"output_router_logits": True} if hasattr(model.config, "num_experts_per_tok") else {}
    start = time.process_time()
    model.train()
    for step in range(steps):
        batches = [loader.window(step)[0] for loader in loaders]
        inputs = torch.cat([batch.input_ids for batch in batches])
        targets = torch.cat([batch.targets for batch in batches])
        loss = model(inputs, labels=targets, shift_labels=targets, **extra).loss
        precision.backward(loss)
        norm = float(optimizer.squared_norms()["student"].sqrt())
        precision.step(optimizer, schedule.factor(step), {"student": min(1.0, 1.0 / (norm + 1e-12))})
        optimizer.zero_grad()
        if step % 500 == 499:
            print(f"teacher step {step + 1}  loss {loss.item():.3f}", flush=True)
    return time.process_time() - start


def optimizer_of(model: Any, precision: Precision, config: Config) -> AdamW:
    """The product's AdamW over a model's own weights: nothing in the laboratory looks inside, so no projectors."""
    group = ParameterGroup("student", config.train.learning_rate, tuple(model.named_parameters()))
    return precision.optimizer([group], config.train)


def live(model: Any) -> LiveTeacher:
    """A model as the product's teacher."""
    return LiveTeacher(model, vocab_size=model.config.vocab_size, device=CPU, offload=False, is_described=True)


class Remembered(Teacher):
    """A teacher whose last hidden states on a set of rows are kept: answers like the live one, without its forward."""

    kind = "dense"

    def __init__(self, model: Any, rows: Rows) -> None:
        self._head = model.get_output_embeddings().weight
        self._places = {rows.sample_id(number): number for number in range(len(rows))}
        self._hidden = _hidden_states(model, rows)  # [rows, L, D]
        self.num_asked = 0

    def observe(self, batch: Batch, needs: Needs) -> DenseSignal:
        places = torch.tensor([self._places[name] for name in batch.sample_ids])
        hidden = self._hidden[places].reshape(-1, self._hidden.shape[-1]).index_select(0, batch.positions)
        self.num_asked += 1
        return DenseSignal(hidden, HeadWeights(self._head))


@torch.no_grad()
def _hidden_states(model: Any, rows: Rows) -> Tensor:
    parts = []
    for begin in range(0, len(rows), 64):
        batch = rows.batch(range(begin, min(begin + 64, len(rows))))
        parts.append(model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state)
    return torch.cat(parts)


_REMEMBERED: dict[tuple[TeacherName, str, int], Remembered] = {}


def remembered(name: TeacherName, domain: str, num_tokens: int) -> Remembered:
    """The teacher's answers to a transfer set, asked for once in a process."""
    key = (name, domain, num_tokens)
    if key not in _REMEMBERED:
        _REMEMBERED[key] = Remembered(teacher_model(name), texts.transfer_set(domain, num_tokens))
    return _REMEMBERED[key]


@functools.cache
def judge(name: TeacherName, domain: str, side: str) -> Remembered:
    """The teacher's answers to a held-out set."""
    return Remembered(teacher_model(name), getattr(texts.domain(domain), side))


def num_parameters(model: Any) -> int:
    return int(np.sum([parameter.numel() for parameter in model.parameters()]))
