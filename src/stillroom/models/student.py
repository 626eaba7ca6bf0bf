"""The student: takes a batch, returns a view."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from stillroom.core.errors import BrokenAtStart
from stillroom.core.numerics import work_dtype
from stillroom.core.types import Batch, HeadWeights, Needs, StudentView
from stillroom.models.anatomy import anatomy_of, backbone, head_of, in_eval_mode, layers_if_any, layers_of
from stillroom.models.compile import CompiledBody, product_dtype

# -- attention -------------------------------------------------------------------------------------
# Causal attention without a mask, and without asking the device about one; open to view where a term asks for it.
#
# transformers decides in each forward whether a mask is needed at all, and to decide it reads from the device: it
# looks whether the mask is all ones, or whether the positions restart. Our rows are padded on the right and attention
# is causal, so no scored position can see padding and the answer is always no. An attention function that
# transformers knows of, but has no mask builder for, is given none and uses the fast causal kernel.
#
# The fast kernel never makes the probabilities. Layers whose maps are asked for compute them openly instead; the
# others keep the fast kernel, so the price is paid for the chosen layers alone.


NAME = "stillroom_causal"

# Attention modules that compute openly. They stay so after the forward pass, because gradient checkpointing runs it
# again in the backward pass and must find the same arithmetic.
_OPEN: WeakSet[nn.Module] = WeakSet()
_NO_GROUPS = nn.Module()  # stands in for an attention whose heads were repeated: it has no `num_key_value_groups`


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    if module in _OPEN:
        return _attend_in_the_open(
            query, key, value, attention_mask, options.get("dropout", 0.0), options.get("scaling")
        )
    if attention_mask is None and key.shape[1] < query.shape[1] and needs_every_head(query.device):
        options.setdefault("is_causal", getattr(module, "is_causal", True))
        key, value, module = _every_head(key, query), _every_head(value, query), _NO_GROUPS
    if attention_mask is None and _is_short(query, key, options.get("dropout", 0.0)):
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        whole = (query, _every_head(key, query), _every_head(value, query))
        states = _ShortAttention.apply(*(one.to(torch.bfloat16) for one in whole), scale)  # type: ignore[no-untyped-call]
        return states.transpose(1, 2).contiguous(), None
    answer: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return answer


def needs_every_head(device: torch.device) -> bool:
    """Whether keys and values are repeated for each query head before the kernel is called.

    Only the flash kernel takes fewer key heads than query heads, and below sm_80 there is none: torch would fall back
    to plain products that keep [heads, length, length]. With repeated heads the memory-efficient kernel serves there.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) < (8, 0)


def _every_head(states: Tensor, query: Tensor) -> Tensor:
    """Keys or values once for each query head. [B, H_kv, L, D] -> [B, H, L, D]"""
    groups = query.shape[1] // states.shape[1]
    return states.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)


_SHORT = range(64, 513)  # lengths of rows whose probabilities are kept for the backward
_LEAST_WIDTH = 512  # of all heads together: what a small model computes is the same on every machine
_QUERIES = 128  # that are multiplied with the keys before them at a time: an eighth to half of the products is left out


def _is_short(query: Tensor, key: Tensor, dropout: float) -> bool:
    """Whether a CPU trains these rows in BF16 faster with the probabilities kept than with torch's fused kernel."""
    if query.device.type != "cpu" or product_dtype(query) != torch.bfloat16 or not query.requires_grad or dropout:
        return False
    num_heads, length, width = query.shape[1:]
    return length in _SHORT and key.shape[2] == length and num_heads * width >= _LEAST_WIDTH


class _ShortAttention(torch.autograd.Function):
    """Causal attention from BF16: scores and softmax in FP32, probabilities and their products in BF16.

    With its backward torch's fused kernel takes up to twice as long on a CPU with BF16 units, and is no more exact
    (benchmarks/training/cpu_parts.py).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        length, kept, output = query.shape[2], [], torch.empty_like(query)
        with torch.autocast("cpu", enabled=False):
            wide_query, wide_key = query.float().mul_(scale), key.float().transpose(-1, -2)
            for start in range(0, length, _QUERIES):
                stop = min(length, start + _QUERIES)
                scores = wide_query[:, :, start:stop] @ wide_key[..., :stop]
                is_later = torch.ones(stop - start, stop - start, dtype=torch.bool).triu_(1)
                scores[..., start:].masked_fill_(is_later, float("-inf"))
                probs = torch.softmax(scores, dim=-1).to(value.dtype)
                output[:, :, start:stop] = probs @ value[:, :, :stop]
                kept.append(probs)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *kept = ctx.saved_tensors
        to_query, to_key, to_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for number, probs in enumerate(kept):
            start, stop = number * _QUERIES, probs.shape[-1]
            here = upstream[:, :, start:stop]
            slope = here @ value[:, :, :stop].transpose(-1, -2)
            slope = torch._softmax_backward_data(slope, probs, -1, probs.dtype)
            to_query[:, :, start:stop] = slope @ key[:, :, :stop]
            to_key[:, :, :stop] += slope.transpose(-1, -2) @ query[:, :, start:stop]
            to_value[:, :, :stop] += probs.transpose(-1, -2) @ here
        return to_query.mul_(ctx.scale), to_key.mul_(ctx.scale), to_value, None


def _attend_in_the_open(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """The same attention with its probabilities, in FP32 and before dropout: noise is not part of what is matched.

    `mask` is that of packed rows, True where a position may look; None: causal.
    """
    if key.shape[1] < query.shape[1]:
        key, value = _every_head(key, query), _every_head(value, query)
    num_queries, num_keys = query.shape[2], key.shape[2]
    with torch.autocast(query.device.type, enabled=False):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        wide = work_dtype(query)
        scores = (query.to(wide) * scale) @ key.to(wide).transpose(-1, -2)
        is_past = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
        probs = torch.softmax(scores.masked_fill(~(is_past if mask is None else mask), float("-inf")), dim=-1)
        output = F.dropout(probs, dropout, training=dropout > 0) @ value.to(wide)
    return output.to(value.dtype).transpose(1, 2).contiguous(), probs


AttentionInterface.register(NAME, _attend)


def attend_causally(model: Any) -> bool:
    """Switch a model to maskless causal attention where that is exactly what it computes. True if it was switched.

    Sliding windows, chunks and soft-capped scores need their own masks or kernels and stay as they are.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa" or not _is_plain(config):
        return False
    model.set_attn_implementation(NAME)
    return True


def attention_of(block: nn.Module) -> nn.Module:
    """The self-attention of a block: the first module whose class is named so."""
    for module in block.modules():
        if type(module).__name__.endswith("Attention") and not getattr(module, "is_cross_attention", False):
            return module
    raise LookupError(f"no attention in {type(block).__name__}")


def attend_openly(blocks: Sequence[nn.Module], layers: Collection[int]) -> None:
    """From here on the attention of these layers, and of no other block of the model, makes its probabilities."""
    if not layers and not _OPEN:
        return
    for module in [module for block in blocks for module in block.modules()]:
        _OPEN.discard(module)
    for layer in layers:
        _OPEN.add(attention_of(blocks[layer]))


def show_attention(model: Any) -> str:
    """Make a model able to give its attention maps; says how. One with its own masks turns to eager attention."""
    if model.config.get_text_config()._attn_implementation == NAME:
        return "computes the attention of the chosen layers openly, without the fast kernel"
    model.set_attn_implementation("eager")
    return "uses eager attention in all layers: its kind of attention has no open form layer by layer"


def _is_plain(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and set(kinds) != {"full_attention"}:
        return False
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "attention_chunk_size", None):
        return False
    uses_window = getattr(config, "use_sliding_window", True)
    return not (uses_window and getattr(config, "sliding_window", None))


# -- tied embedding --------------------------------------------------------------------------------
# The gradient of a weight that is both embedding and head, without further [V, D] tensors.
#
# torch fills a [V, D] tensor with zeros for the few rows that a batch reads, and adds it to the head's gradient into a
# third: each is new memory, which the system clears page by page. Here the embedding's gradient names its rows alone
# and is added to the head's in place. A row is summed in the same order, so the result has the same bits.
#
# # V vocabulary, D width


class _TwoUses(torch.autograd.Function):
    """A weight for the embedding and for the head. The head's gradient belongs to this node alone: it is written to."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return weight.detach(), weight.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, embedding: Tensor | None, head: Tensor | None) -> Tensor | None:
        if embedding is None:
            return head
        return embedding.to_dense() if head is None else head.add_(embedding)


class _Rows(torch.autograd.Function):
    """`functional.embedding` with a gradient that is sparse and has no row twice."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding = weight.shape, padding
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        rows, places = ids.unique(return_inverse=True)
        values = torch.ops.aten.embedding_dense_backward(upstream, places, len(rows), -1, False)
        if ctx.padding is not None:
            values[rows == ctx.padding] = 0.0
        shape = ctx.shape
        return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False, is_coalesced=True), None, None


class TiedEmbedding:
    """The forward of a student's embedding, which keeps the head's use of the weight until that is asked for."""

    def __init__(self, inputs: nn.Embedding) -> None:
        self._inputs = inputs
        self._for_head: Tensor | None = None
        inputs.forward = self  # type: ignore[assignment]

    def __call__(self, ids: Tensor) -> Tensor:
        inputs = self._inputs
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return F.embedding(ids, inputs.weight, inputs.padding_idx)
        weight, self._for_head = _TwoUses.apply(inputs.weight)  # type: ignore[no-untyped-call]
        return cast(Tensor, _Rows.apply(weight, ids, inputs.padding_idx))  # type: ignore[no-untyped-call]

    def take(self) -> Tensor | None:
        """The head's use of the weight in the last forward; None: it was not split since it was last taken."""
        weight, self._for_head = self._for_head, None
        return weight


def tie(model: Any) -> TiedEmbedding | None:
    """Join the gradients of an FP32 embedding and head on a CPU that are one weight; None: they are not."""
    inputs, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(inputs) is not nn.Embedding or inputs.weight is not getattr(head, "weight", None):
        return None
    weight, is_plain = inputs.weight, inputs.max_norm is None and not inputs.scale_grad_by_freq and not inputs.sparse
    is_served = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.requires_grad
    return TiedEmbedding(inputs) if is_plain and is_served else None


# -- packed ----------------------------------------------------------------------------------------
# Rows that hold several texts: positions and attention that restart with each.
#
# A model gets the position of each token in its own text. One that uses our maskless attention also gets the mask,
# which is causal and block-diagonal; any other builds its own mask from the positions, with its windows and chunks.
# Whether a family does either is not concluded from its name: `packing_error` tries it.
#
# # B rows, L positions


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
    """[B, 1, L, L] Which position may attend to which: to earlier ones in the same text, and itself."""
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
def packing_error(model: Any) -> tuple[float, float]:
    """How far the hidden states of texts in one row differ from those of each text alone, in standard deviations.

    And how far they differ by rounding alone: for each text with others after it, which no causal model sees. There
    only the shapes of the products are others.
    """
    device = model.get_input_embeddings().weight.device
    num_tokens = int(model.get_input_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(_SEED)
    texts = [torch.randint(num_tokens, (1, length), generator=generator).to(device) for length in _LENGTHS]
    segments = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(_LENGTHS)).unsqueeze(0).to(device)
    ids = torch.cat(texts, dim=1)
    ones = torch.ones_like(ids)
    batch = Batch(ids, ones, ids, ones, ("trial",), segments=segments)
    body = backbone(model)
    with in_eval_mode(model):
        together = body(**model_inputs(model, batch), use_cache=False).last_hidden_state.float()
        alone = [body(input_ids=text, use_cache=False).last_hidden_state.float() for text in texts]
        followed = [body(input_ids=torch.cat([text, ids], dim=1), use_cache=False).last_hidden_state for text in texts]
    expected = torch.cat(alone, dim=1)
    rounded = torch.cat(
        [states[:, : text.shape[1]].float() for states, text in zip(followed, texts, strict=True)], dim=1
    )
    spread = expected.std().clamp_min(1e-6)
    return float((together - expected).abs().max() / spread), float((rounded - expected).abs().max() / spread)


# -- length ----------------------------------------------------------------------------------------
# How long a row a model can read, as its configuration says.


# Scalings whose factor multiplies the original length. `max_position_embeddings` is the original one with some, and
# already the longer one with others, so the larger of both is taken.
_STRETCHING = ("linear", "dynamic", "yarn", "longrope", "llama3")


def num_positions(model: Any) -> int | None:
    """The most positions a row may have; None if the model has no such limit.

    A scaled rotary embedding counts with its factor. A sliding window bounds what a position sees and not the length of
    a row, so it is not a limit.
    """
    config = model.config.get_text_config()
    table = int(getattr(config, "max_position_embeddings", 0) or 0)
    if table < 1:
        return None
    return max([table, *(_stretched(scaling, table) for scaling in _scalings(config))])


def _scalings(config: Any) -> Iterator[Mapping[str, Any]]:
    """The settings of the rotary embedding: one for all layers, or one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        if isinstance(found, Mapping):
            nested = [inner for inner in found.values() if isinstance(inner, Mapping)]
            yield from nested or [found]


def _stretched(scaling: Mapping[str, Any], table: int) -> int:
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor")
    if kind not in _STRETCHING or not isinstance(factor, int | float):
        return 0
    return int(factor * int(scaling.get("original_max_position_embeddings") or table))


# -- taps ------------------------------------------------------------------------------------------
# Read hidden states and attention maps of chosen layers by forward hooks.
#
# `output_hidden_states=True` would keep every layer's states. Only the layers that an objective needs get a hook.


@contextmanager
def tapped(blocks: Sequence[nn.Module], needs: Needs) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that the model's forward in the body fills: `hidden.<layer>` [B, L, D], `attention.<layer>`
    [B, H, L, L]."""
    taps: dict[str, Tensor] = {}

    def keep_hidden(layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            taps[f"hidden.{layer}"] = output[0] if isinstance(output, tuple) else output

        return hook

    def keep_attention(layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, tuple) and len(output) > 1 and isinstance(output[1], Tensor):
                taps[f"attention.{layer}"] = output[1]

        return hook

    if not blocks and (needs.hidden_layers or needs.attention_layers):
        raise BrokenAtStart(
            "the model is not a list of layers that can be looked at",
            advice=["use objectives on the model's answers alone (kd, ce)"],
        )
    attend_openly(blocks, needs.attention_layers)
    handles = [blocks[layer].register_forward_hook(keep_hidden(layer)) for layer in sorted(needs.hidden_layers)]
    for layer in sorted(needs.attention_layers):
        handles.append(attention_of(blocks[layer]).register_forward_hook(keep_attention(layer)))
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def gives_attention(model: Any, layers: Collection[int]) -> bool:
    """Whether the taps of these layers give causal attention maps. Tested on a few tokens."""
    device = next(model.parameters()).device
    ids = torch.arange(4, device=device).unsqueeze(0)
    try:
        with in_eval_mode(model), tapped(layers_of(model), Needs(attention_layers=frozenset(layers))) as taps:
            backbone(model)(input_ids=ids, use_cache=False)
    except LookupError:  # a block without an attention module
        return False
    maps = [taps.get(f"attention.{layer}") for layer in layers]
    return all(
        weights is not None
        and weights.ndim == 4
        and weights.shape[2:] == (4, 4)
        and bool(torch.allclose(weights.float().sum(-1), torch.ones((), device=device), atol=1e-2))
        and bool((weights.float().triu(1) == 0).all())
        for weights in maps
    )


class Student:
    """A language model that returns hidden states at the scored positions."""

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        is_described: bool,
        compiled: CompiledBody | None = None,
        tied: TiedEmbedding | None = None,
    ) -> None:
        self.model = model
        self._compiled, self._tied = compiled, tied
        self.is_compiled = compiled is not None
        self.vocab_size = vocab_size
        self.is_described = is_described
        self._blocks = layers_if_any(model)

    @property
    def num_parameters(self) -> int:
        return anatomy_of(self.model).num_parameters

    def observe(self, batch: Batch, needs: Needs) -> StudentView:
        if self._tied is not None:
            self._tied.take()  # of a forward that was made elsewhere
        with tapped(self._blocks, needs) as taps:
            # Evaluation, and layers that are looked at, use the body as it is.
            is_plain_training = self.model.training and torch.is_grad_enabled() and needs == Needs()
            compiled = self._compiled if is_plain_training and batch.segments is None else None
            hidden, head = last_hidden(self.model, batch, self.vocab_size, self.is_described, compiled)
        if self._tied is not None and (weight := self._tied.take()) is not None:
            head = replace(head, weight=weight)
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
