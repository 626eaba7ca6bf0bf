"""Compare the vocabularies of two models, and give a model the vocabulary of another tokenizer.

Equal sizes prove nothing and different sizes may be padding, so tokenizers are compared by content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.data.tokenize import vocabulary_hash as vocabulary_hash


def num_ids(tokenizer: Any) -> int:
    """The number of ids from 0 to the highest in use."""
    return int(max(tokenizer.get_vocab().values())) + 1


def agree_on_vocabulary(teacher: Any, student: Any, teacher_rows: int, student_rows: int) -> int:
    """The number of ids that both models share. Raise if the vocabularies differ.

    `teacher` and `student` are tokenizers, the row counts those of the heads. Of heads padded to different multiples
    the smaller counts, if every real token fits.
    """
    mine, theirs = student.get_vocab(), teacher.get_vocab()
    if mine != theirs:
        shared = len(mine.keys() & theirs.keys())
        moved = sum(1 for token in mine.keys() & theirs.keys() if mine[token] != theirs[token])
        raise ConfigError(
            f"teacher and student have different vocabularies: {len(theirs):,} and {len(mine):,} tokens "
            f"(hashes {vocabulary_hash(teacher)} and {vocabulary_hash(student)}), "
            f"{shared:,} in common, {moved:,} of them under another id",
            where="teacher.model, student.model",
            advice=[
                "teach across tokenizers: --preset cross-tokenizer",
                "or give a pretrained student the teacher's tokens: --set student.vocabulary=teacher",
                "choose a student of the teacher's family",
                "or train a student from scratch on the teacher's tokenizer: --set student.init=random with a "
                "configuration whose vocab_size is the teacher's",
            ],
        )
    size = min(teacher_rows, student_rows)
    highest = num_ids(student) - 1
    if highest >= size:
        raise ConfigError(
            f"token id {highest:,} has no row in a head of {size:,} rows",
            where="teacher.model, student.model",
            advice=["resize the smaller model's embeddings to the tokenizer"],
        )
    return size


def check_rows(tokenizer: Any, head_rows: int, embedding_rows: int, name: str) -> None:
    """Raise if a token of the tokenizer has no row in the model's embeddings or head."""
    num_rows = min(head_rows, embedding_rows)
    highest = num_ids(tokenizer) - 1 if tokenizer is not None else -1
    if highest >= num_rows:
        raise ConfigError(
            f"the tokenizer goes up to token id {highest:,}, and {name} has {embedding_rows:,} embeddings and "
            f"a head of {head_rows:,} rows",
            where=name,
            advice=["use the tokenizer the model was made with", "or resize the model's embeddings to the tokenizer"],
        )


# -- another vocabulary ----------------------------------------------------------------------------------
# New rows of the embeddings and the head are made from the old ones. A token that consists of one old token takes its
# row, one of several the mean of theirs, in the embeddings, the head and the head's bias alike. One that consists of
# none takes the mean of all old tokens, which favours no other.
#
# V new ids, O old rows, D width


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
    _check_agreement(network, inputs.weight, head.weight, len(pieces), is_tied=is_tied)
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


def _check_agreement(network: Any, embeddings: Tensor, head: Tensor, size: int, *, is_tied: bool) -> None:
    sizes = {"embeddings": embeddings.shape[0], "head": head.shape[0]}
    wrong = [f"{name} {rows:,}" for name, rows in sizes.items() if rows != size]
    if wrong or (head is embeddings) != is_tied:
        what = ", ".join(wrong) or f"a head that is {'no longer' if is_tied else 'now'} tied to the embeddings"
        raise BrokenAtStart(
            f"{type(network).__name__} cannot take a vocabulary of {size:,} tokens: it has {what} after the change",
            where="student.vocabulary",
            advice=["leave student.vocabulary out, and teach across tokenizers: --preset cross-tokenizer"],
        )
