"""A model's layers, widths, vocabulary, and how its head turns hidden states into logits.

The head is described, not called, so that objectives can evaluate it a chunk at a time. Models differ in what follows
the last product (Granite divides, Cohere multiplies, Gemma 2 caps), so the description is checked against the model's
own logits before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.core.errors import BrokenAtStart
from stillroom.core.types import HeadWeights

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
