"""Give a model the vocabulary of another tokenizer: new rows of its embeddings and its head, made from the old ones.

A token that consists of one old token takes its row, one of several the mean of theirs, in the embeddings, the head and
the head's bias alike. One that consists of none takes the mean of all old tokens, which favours no other.

# V new ids, O old rows, D width
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stillroom.errors import BrokenAtStart


@torch.no_grad()
def replace_vocabulary(network: Any, pieces: Sequence[Sequence[int]], used: Sequence[int]) -> None:
    """Change the network in place. `pieces` are the old tokens of each new id, `used` the old ids that are tokens."""
    inputs, head = network.get_input_embeddings(), network.get_output_embeddings()
    is_tied = head.weight is inputs.weight
    bias = getattr(head, "bias", None)
    tables = [new_rows(table, pieces, used) for table in (inputs.weight, head.weight)]
    new_bias = None if bias is None else new_rows(bias.unsqueeze(1), pieces, used).squeeze(1)
    network.resize_token_embeddings(len(pieces), mean_resizing=False)
    inputs, head = network.get_input_embeddings(), network.get_output_embeddings()
    _check(network, inputs.weight, head.weight, len(pieces), is_tied=is_tied)
    inputs.weight.copy_(tables[0])
    if not is_tied:
        head.weight.copy_(tables[1])
    if new_bias is not None:
        head.bias.copy_(new_bias)
    if hasattr(inputs, "padding_idx"):
        inputs.padding_idx = None  # the old padding's id is an ordinary token now, and would get no gradient


def new_rows(table: Tensor, pieces: Sequence[Sequence[int]], used: Sequence[int]) -> Tensor:
    """[V, D] The mean of the old rows [O, D] of each new id, summed in FP32."""
    rows = table.detach().float()
    sizes = torch.tensor([len(one) for one in pieces])
    flat = torch.tensor([old for one in pieces for old in one], dtype=torch.long)
    owners = torch.repeat_interleave(torch.arange(len(pieces)), sizes)
    sums = torch.zeros(len(pieces), rows.shape[1]).index_add(0, owners, rows.index_select(0, flat))
    average = rows.index_select(0, torch.tensor(used)).mean(0)
    means = torch.where(sizes[:, None] > 0, sums / sizes.clamp_min(1)[:, None], average)
    return means.to(table.dtype)


def take_marks(network: Any, tokenizer: Any) -> None:
    """Write the tokenizer's begin, end and padding marks into the network's configuration, as its files will say."""
    marks = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "pad")}
    for config in (network.config, network.config.get_text_config(), getattr(network, "generation_config", None)):
        for name, value in marks.items() if config is not None else ():
            setattr(config, name, value)


def _check(network: Any, embeddings: Tensor, head: Tensor, size: int, *, is_tied: bool) -> None:
    sizes = {"embeddings": embeddings.shape[0], "head": head.shape[0]}
    wrong = [f"{name} {rows:,}" for name, rows in sizes.items() if rows != size]
    if wrong or (head is embeddings) != is_tied:
        what = ", ".join(wrong) or f"a head that is {'no longer' if is_tied else 'now'} tied to the embeddings"
        raise BrokenAtStart(
            f"{type(network).__name__} cannot take a vocabulary of {size:,} tokens: it has {what} after the change",
            where="student.vocabulary",
            advice=["leave student.vocabulary out, and teach across tokenizers: --preset cross-tokenizer"],
        )
