"""Rows that hold several texts: positions and attention that begin anew with each.

A model gets the position of each token in its own text. One that uses our maskless attention also gets the mask, which
is causal and block-diagonal; any other builds its own mask from the positions, with its windows and chunks. Whether a
family does either is not concluded from its name: `packing_error` tries it.

# B rows, L positions
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stillroom.models.anatomy import backbone
from stillroom.models.attention import NAME
from stillroom.types import Batch

_LENGTHS = (7, 1, 5, 11)
_SEED = 20_241


def model_inputs(model: Any, batch: Batch) -> dict[str, Tensor]:
    """What the model is called with for a batch.

    Rows of one text get no attention mask: they are padded on the right and attention is causal, so no scored position
    attends to padding.
    """
    if batch.segments is None:
        return {"input_ids": batch.input_ids}
    inputs = {"input_ids": batch.input_ids, "position_ids": positions_of(batch.segments)}
    if model.config.get_text_config()._attn_implementation == NAME:
        inputs["attention_mask"] = block_mask(batch.segments)
    return inputs


def positions_of(segments: Tensor) -> Tensor:
    """[B, L] The place of each position in its own text."""
    places = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    begins = torch.zeros_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values


def block_mask(segments: Tensor) -> Tensor:
    """[B, 1, L, L] Which position may attend to which: to earlier ones of its own text, and itself."""
    is_same = segments.unsqueeze(2) == segments.unsqueeze(1)
    return is_same.tril().unsqueeze(1)


def sequences_of(batch: Batch) -> tuple[Tensor, int]:
    """The text that each scored position belongs to [N], counted over the batch, and how many texts there are."""
    num_rows, length = batch.input_ids.shape
    if batch.segments is None:
        return batch.positions // length, num_rows
    in_row = batch.segments.reshape(-1).index_select(0, batch.positions)
    return batch.positions // length * length + in_row, num_rows * length  # a row has at most `length` texts


@torch.no_grad()
def packing_error(model: Any) -> float:
    """How far the hidden states of texts in one row differ from those of each text alone, in standard deviations."""
    device = model.get_input_embeddings().weight.device
    num_tokens = int(model.get_input_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(_SEED)
    texts = [torch.randint(num_tokens, (1, length), generator=generator).to(device) for length in _LENGTHS]
    segments = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(_LENGTHS)).unsqueeze(0).to(device)
    ids = torch.cat(texts, dim=1)
    ones = torch.ones_like(ids)
    batch = Batch(ids, ones, ids, ones, ("trial",), segments=segments)
    was_training, body = model.training, backbone(model)
    model.eval()
    try:
        together = body(**model_inputs(model, batch), use_cache=False).last_hidden_state.float()
        alone = [body(input_ids=text, use_cache=False).last_hidden_state.float() for text in texts]
    finally:
        model.train(was_training)
    expected = torch.cat(alone, dim=1)
    return float((together - expected).abs().max() / expected.std().clamp_min(1e-6))
