"""Activation checkpointing: recompute layers in the backward pass instead of keeping their activations."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.utils.checkpoint import checkpoint


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
