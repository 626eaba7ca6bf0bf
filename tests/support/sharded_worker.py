"""One of two processes that compute the fused loss inside DistributedDataParallel and inside FSDP.

The head is where it has to be for both: in the forward of the module that they wrap, because only there are its
weights whole. Gradients are what both promise, the mean over the processes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from stillroom.losses.head.loss import DenseTeacher, fused_head_loss

WIDTH, VOCAB, ROWS, LENGTH = 16, 61, 3, 9


class LossWeights(nn.Module):
    """A student and its loss: hidden states from the body, the rest from the fused head, or by hand."""

    def __init__(self, is_tied: bool, *, is_fused: bool = True) -> None:
        super().__init__()
        self.is_fused = is_fused
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=is_tied,
        )  # fmt: skip
        self.model = AutoModelForCausalLM.from_config(config)
        self.model.gradient_checkpointing_enable()

    def forward(self, ids: Tensor, labels: Tensor, teacher: DenseTeacher) -> Tensor:
        hidden = self.model.base_model(ids).last_hidden_state.reshape(-1, WIDTH)
        weight = self.model.get_output_embeddings().weight
        if self.is_fused:
            return fused_head_loss(hidden, weight, teacher, labels.reshape(-1), chunk_tokens=5).loss
        return by_hand(hidden @ weight.t(), teacher.hidden @ teacher.weight.t(), labels.reshape(-1))


def by_hand(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """What the fused loss computes by default: half KL at temperature 2 with its square, half cross-entropy."""
    kept = labels >= 0
    student, teacher = student[kept], teacher[kept]
    kl = F.kl_div(
        F.log_softmax(student / 2, -1), F.log_softmax(teacher / 2, -1), log_target=True, reduction="batchmean"
    )
    return 0.5 * 4 * kl + 0.5 * F.cross_entropy(student, labels[kept])


def batches(rank: int) -> list[tuple[Tensor, Tensor, DenseTeacher]]:
    """Two micro-batches of a process, with masked labels."""
    draw = torch.Generator().manual_seed(10 + rank)
    found = []
    for _ in range(2):
        ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=draw)
        labels = torch.where(torch.rand(ROWS, LENGTH, generator=draw) < 0.3, -100, ids.roll(-1, 1))
        hidden = torch.randn(ROWS * LENGTH, 24, generator=draw)
        weight = torch.randn(VOCAB, 24, generator=torch.Generator().manual_seed(5))
        found.append((ids, labels, DenseTeacher(hidden, weight)))
    return found


def gradients(loss_weights: nn.Module, parts: list[Any]) -> dict[str, Tensor]:
    loss_weights.train()
    for part in parts:
        loss_weights(*part).backward()
    named = {name.removeprefix("module."): parameter.grad for name, parameter in loss_weights.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in named.items()}


def expected(is_tied: bool) -> dict[str, Tensor]:
    """In one process and by plain autograd: the mean over both of what each would find."""
    sides = [gradients(LossWeights(is_tied, is_fused=False), batches(rank)) for rank in (0, 1)]
    return {name: (sides[0][name] + sides[1][name]) / 2 for name in sides[0]}


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    mine = batches(dist.get_rank())
    found = {}
    for is_tied in (False, True):
        alone = LossWeights(is_tied)
        found[f"ddp {is_tied}"] = gradients(nn.parallel.DistributedDataParallel(copy.deepcopy(alone)), mine)
        sharded = copy.deepcopy(alone)
        for layer in sharded.model.base_model.layers:
            fully_shard(layer)
        found[f"fsdp {is_tied}"] = gradients(fully_shard(sharded), mine)
    if dist.get_rank() == 0:
        torch.save(found, out)
    dist.destroy_process_group()
