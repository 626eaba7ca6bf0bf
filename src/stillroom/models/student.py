"""The student: takes a batch, returns a view."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stillroom.core.types import Batch, HeadWeights, Needs, StudentView
from stillroom.models.anatomy import anatomy_of, backbone, head_of, layers_if_any
from stillroom.models.attention import model_inputs, sequences_of, tapped
from stillroom.models.compile import CompiledBody


class Student:
    """A language model that returns hidden states at the scored positions."""

    def __init__(
        self, model: Any, *, vocab_size: int, is_described: bool, compiled: CompiledBody | None = None
    ) -> None:
        self.model = model
        self._compiled = compiled
        self.vocab_size = vocab_size
        self.is_described = is_described
        self._blocks = layers_if_any(model)

    @property
    def num_parameters(self) -> int:
        return anatomy_of(self.model).num_parameters

    def observe(self, batch: Batch, needs: Needs) -> StudentView:
        with tapped(self._blocks, needs) as taps:
            # Evaluation, and layers that are looked at, use the body as it is.
            is_plain_training = self.model.training and torch.is_grad_enabled() and needs == Needs()
            compiled = self._compiled if is_plain_training and batch.segments is None else None
            hidden, head = last_hidden(self.model, batch, self.vocab_size, self.is_described, compiled)
        positions = batch.positions
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)
        return StudentView(chosen, head, taps, positions, *sequences_of(batch))

    def train(self) -> None:
        self.model.train()

    def eval(self) -> None:
        self.model.eval()


def last_hidden(
    model: Any, batch: Batch, vocab_size: int, is_described: bool, compiled: CompiledBody | None = None
) -> tuple[Tensor, HeadWeights]:
    """The input of the head, and the head.

    For a model whose head cannot be described: its logits and an identity head, which is correct but keeps a
    [tokens, vocabulary] tensor.
    """
    if is_described and compiled is not None:
        return compiled(batch.input_ids), head_of(model, vocab_size)
    if is_described:
        body = backbone(model)
        output = body(**model_inputs(model, batch), use_cache=False)
        return output.last_hidden_state, head_of(model, vocab_size)
    output = model(**model_inputs(model, batch), use_cache=False)
    logits = output.logits
    identity = torch.empty(0, device=logits.device, dtype=logits.dtype)
    return logits, HeadWeights(identity, vocab_size=vocab_size)


# -- recompute -------------------------------------------------------------------------------------
# Activation checkpointing: recompute layers in the backward pass instead of keeping their activations.


@contextmanager
def recomputed(blocks: Sequence[nn.Module], is_on: bool = True) -> Iterator[None]:
    """Recompute the blocks' forwards in any backward inside the body.

    The models' own switch works only in training mode, which would also enable the teacher's dropout and jitter.
    """
    chosen = [block for block in blocks if is_on and "forward" not in vars(block)]
    for block in chosen:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in chosen:
            del block.forward
