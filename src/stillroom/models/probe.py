"""What a model is made of: layers, widths, vocabulary, and how its head turns hidden states into logits.

The head is described, not called, so that objectives can evaluate it a chunk at a time. Models differ in
what they do after the last product (Granite divides, Cohere multiplies, Gemma 2 caps), so the description
is checked against the model's own logits before anything relies on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.types import HeadWeights


@dataclass(frozen=True)
class Anatomy:
    """The numbers a report, a plan or a check needs."""

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


def anatomy(model: Any) -> Anatomy:
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    inputs = model.get_input_embeddings()
    return Anatomy(
        family=str(config.model_type),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_layers=int(config.num_hidden_layers),
        width=int(config.hidden_size),
        vocab_rows=int(head.weight.shape[0]),
        is_tied=head.weight is inputs.weight,
    )


def backbone(model: Any) -> nn.Module:
    """The model without its head: returns hidden states and makes no logits."""
    body: nn.Module = model.base_model
    return body


def layers(model: Any) -> list[nn.Module]:
    """The decoder's blocks: the one list of modules as long as the configuration says."""
    wanted = int(model.config.get_text_config().num_hidden_layers)
    for module in backbone(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return list(module)
    raise LookupError(f"no list of {wanted} layers in {type(model).__name__}")


def head_of(model: Any, vocab_size: int | None = None) -> HeadWeights:
    """The live head of a model: its tensors are the model's own, so gradients reach them."""
    config = model.config.get_text_config()
    linear = model.get_output_embeddings()
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite: a divisor
        scale = 1.0 / float(config.logits_scaling)
    if getattr(config, "logit_scale", None):  # Cohere: a factor
        scale = float(config.logit_scale)
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    rows = int(linear.weight.shape[0])
    return HeadWeights(
        weight=linear.weight,
        bias=getattr(linear, "bias", None),
        scale=scale,
        softcap=float(softcap) if softcap else None,
        vocab_size=vocab_size if vocab_size and vocab_size < rows else None,
    )


def head_logits(head: HeadWeights, hidden: Tensor) -> Tensor:
    """Logits by the description, in the widest dtype at hand. For checks and small batches only."""
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
    """The largest difference between described and real logits on a batch, relative to their spread."""
    was_training = model.training
    model.eval()
    hidden = backbone(model)(input_ids=input_ids, use_cache=False).last_hidden_state
    own = model(input_ids=input_ids, use_cache=False).logits.float()
    described = head_logits(head_of(model), hidden)
    model.train(was_training)
    if own.shape != described.shape:
        return float("inf")
    spread = own.std().clamp_min(1e-6)
    return float(((own - described).abs().max() / spread).item())
