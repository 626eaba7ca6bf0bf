"""A model's layers, widths, vocabulary, and how its head turns hidden states into logits.

The head is described, not called, so that objectives can evaluate it a chunk at a time. Models differ in what follows
the last product (Granite divides, Cohere multiplies, Gemma 2 caps), so the description is checked against the model's
own logits before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.core.types import HeadWeights
from stillroom.data.tokenize import vocabulary_hash as vocabulary_hash
from stillroom.models.routers import gates_by_structure

_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma 2, RecurrentGemma, xLSTM
_LARGE_LOGIT = 64.0  # above the caps in use, which are 15 to 50


@dataclass(frozen=True)
class Anatomy:
    """Sizes of a model."""

    family: str
    num_parameters: int
    num_layers: int
    width: int
    vocab_rows: int
    is_tied: bool

    def to_dict(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "parameters": self.num_parameters,
            "layers": self.num_layers,
            "width": self.width,
            "vocabulary": self.vocab_rows,
            "tied": self.is_tied,
        }


def anatomy_of(model: Any) -> Anatomy:
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    inputs = model.get_input_embeddings()
    return Anatomy(
        family=str(config.model_type),
        num_parameters=sum(_num_elements(parameter) for parameter in model.parameters()),
        num_layers=int(config.num_hidden_layers),
        width=int(config.hidden_size),
        vocab_rows=int(head.weight.shape[0]),
        is_tied=head.weight is inputs.weight,
    )


def _num_elements(parameter: Tensor) -> int:
    """bitsandbytes packs two weights of four bits into a byte, and keeps their shape next to them."""
    packed = getattr(parameter, "quant_state", None)
    return math.prod(packed.shape) if packed is not None else parameter.numel()


def backbone(model: Any) -> nn.Module:
    """The model without its head: returns hidden states and computes no logits.

    `base_model` of some classes (Llama 4) is the whole model; take the child that holds the embeddings.
    """
    body: nn.Module = model.base_model
    inputs = model.get_input_embeddings()
    for part in body.children() if model.base_model is model else ():
        if part is not inputs and any(module is inputs for module in part.modules()):
            return part
    return body


def layers_of(model: Any) -> list[nn.Module]:
    """The decoder's blocks: the list of modules whose length is the configured number of layers."""
    layers = layers_if_any(model)
    if not layers:
        raise BrokenAtStart(
            f"no list of {_num_layers(model)} layers in {type(model).__name__}: its layers cannot be looked at",
            advice=["use objectives on the model's answers alone (kd, ce)"],
        )
    return layers


def layers_if_any(model: Any) -> list[nn.Module]:
    """The decoder's blocks; empty for a model that is not a list of layers.

    A vision-language model has two such lists: search the decoder first.
    """
    wanted = _num_layers(model)
    for body in (*_decoders(model), backbone(model)):
        for module in body.modules():
            if isinstance(module, nn.ModuleList) and len(module) == wanted:
                return list(module)
    return []


def _decoders(model: Any) -> list[nn.Module]:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return [decoder] if isinstance(decoder, nn.Module) else []


def _num_layers(model: Any) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def hidden_matrices(model: Any) -> dict[str, nn.Parameter]:
    """The trained matrices between embeddings and head that multiply features, by name; experts in one tensor too.

    Not among them: gates, whose rows are experts and not features, and matrices of one row or column.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    outside = {id(model.get_output_embeddings().weight), *tables} | {
        id(model.get_parameter(gate.weight)) for gate in gates_by_structure(model)
    }
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in outside and _multiplies(name, parameter)
    }


def _multiplies(name: str, parameter: Tensor) -> bool:
    """A state-space layer has matrices of rates, which are not called weights, and filters of one row."""
    is_matrix = parameter.ndim == 2 and name.endswith(".weight")
    return (is_matrix or parameter.ndim == 3) and min(parameter.shape[-2:]) > 1


def head_of(model: Any, vocab_size: int | None = None) -> HeadWeights:
    """The head of a model. Its tensors are the model's own, so gradients reach them.

    Under autocast an FP32 head gets half operands for its products, as in the model's own call.
    """
    config = model.config.get_text_config()
    linear = model.get_output_embeddings()
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite: a divisor
        scale = 1.0 / float(config.logits_scaling)
    if getattr(config, "logit_scale", None):  # Cohere: a factor
        scale = float(config.logit_scale)
    caps = [getattr(config, name, None) for name in _CAPS]
    num_rows = int(linear.weight.shape[0])
    return HeadWeights(
        weight=linear.weight,
        bias=getattr(linear, "bias", None),
        scale=scale,
        softcap=next((float(cap) for cap in caps if cap), None),
        vocab_size=vocab_size if vocab_size and vocab_size < num_rows else None,
        product_dtype=_autocast_dtype(linear.weight),
    )


def _autocast_dtype(weight: Tensor) -> torch.dtype | None:
    """The half dtype that autocast would give this weight now; None where it would leave it alone."""
    kind = weight.device.type
    if weight.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


def head_logits(head: HeadWeights, hidden: Tensor) -> Tensor:
    """Logits by the description, in FP32. For checks and small batches only."""
    if head.is_identity:
        return hidden.float()[..., : head.vocab_size]
    weight = head.weight[: head.num_real]
    logits = hidden.float() @ weight.float().T
    if head.bias is not None:
        logits = logits + head.bias[: head.num_real].float()
    logits = logits * head.scale
    return head.softcap * torch.tanh(logits / head.softcap) if head.softcap else logits


@torch.no_grad()
def head_error(model: Any, input_ids: Tensor) -> float:
    """The largest difference between described and real logits, relative to their standard deviation.

    Compare twice: as the model is, and with hidden states so large that a cap shows. The logits of an untrained model
    are far below any cap; training raises them.

    Make the head's product in FP32 both times, whatever the dtype of the weights: rounded half logits would look like a
    head that is described wrongly.
    """
    with in_eval_mode(model):
        hidden = getattr(backbone(model)(input_ids=input_ids, use_cache=False), "last_hidden_state", None)
        head = head_of(model)
        if hidden is None or head.weight.ndim != 2 or hidden.shape[-1] != head.weight.shape[1]:
            return float("inf")
        own, _ = _wide_logits(model, input_ids)
        error = _difference(own, head_logits(head, hidden))
        factor = max(1.0, _LARGE_LOGIT / max(float(own.float().abs().max()), 1e-6))
        own, is_called = _wide_logits(model, input_ids, factor)
        return max(error, _difference(own, head_logits(head, hidden.float() * factor))) if is_called else error


def _wide_logits(model: Any, input_ids: Tensor, factor: float = 1.0) -> tuple[Tensor, bool]:
    """The model's logits with the product of its head made in FP32, of what reaches the head times the factor.

    The answer says whether the head was called as a module at all: some models use its weight alone, and their logits
    come back as they are.
    """
    with _head_in_fp32(model.get_output_embeddings(), factor) as calls:
        logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits, bool(calls)


@contextmanager
def _head_in_fp32(head: nn.Module, factor: float) -> Iterator[list[int]]:
    """Let a linear layer multiply its input by the factor and by its weight in FP32. Yield a list that grows with each
    call.

    A layer of another kind keeps its own arithmetic; only its input is multiplied.
    """
    calls: list[int] = []

    def multiply(hidden: Tensor) -> Tensor:
        assert isinstance(head, nn.Linear)
        calls.append(1)
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(hidden.float() * factor, head.weight.float(), bias)

    def enlarge(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        calls.append(1)
        return (inputs[0] * factor, *inputs[1:])

    is_plain = type(head) is nn.Linear and "forward" not in vars(head)
    handle = None if is_plain else head.register_forward_pre_hook(enlarge)
    if is_plain:
        head.forward = multiply
    try:
        yield calls
    finally:
        if handle is None:
            del head.forward
        else:
            handle.remove()


@contextmanager
def in_eval_mode(network: Any) -> Iterator[None]:
    """Put a network in evaluation mode in the body, and restore its mode after it."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


def _difference(own: Tensor, described: Tensor) -> float:
    if own.shape != described.shape:
        return float("inf")
    spread = own.float().std().clamp_min(1e-6)
    return float((own.float() - described).abs().max() / spread)


# -- vocabularies ------------------------------------------------------------------------------------
# Compare the vocabularies of two models, and give a model the vocabulary of another tokenizer.
#
# Equal sizes prove nothing and different sizes may be padding, so tokenizers are compared by content.


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
