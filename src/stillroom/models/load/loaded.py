"""A model that was tried before anything relies on it.

What a model computes is found out by asking it, once, wherever it is used: whether an earlier answer depends on a
later token, whether our description of its head gives its own logits, and whether the attention we choose is the
attention it had. Nothing is concluded from the name of its family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from stillroom.config.schema import StudentConfig, TeacherConfig
from stillroom.errors import BrokenAtStart
from stillroom.models.anatomy import Anatomy, anatomy_of, backbone, head_error, head_of
from stillroom.models.attention import attend_causally
from stillroom.models.compiled import CompiledBody
from stillroom.models.load.open import explained, load_student, load_teacher, load_tokenizer
from stillroom.models.load.vocabulary import check_rows
from stillroom.models.student import Student
from stillroom.types import HeadWeights

_LENGTH = 24
_SEED = 20_240
_FREE_SHARE = 0.5
# Of the logits' spread. FP32 answers differ by the order of summation; half ones by their rounding as well.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 0.05


@dataclass(frozen=True)
class LoadedModel:
    """A network with its tokenizer and what was found when it was tried."""

    network: Any
    tokenizer: Any
    anatomy: Anatomy
    is_described: bool  # whether `head` gives the network's own logits; if not, those are used as they are
    notes: tuple[str, ...] = ()

    @property
    def head(self) -> HeadWeights:
        """The live head, to be relied on where `is_described`."""
        return head_of(self.network)

    def as_student(self, vocab_size: int | None = None, compiled: CompiledBody | None = None) -> Student:
        """The network as something that is scored, over its own vocabulary or the one it shares with another."""
        size = vocab_size or self.anatomy.vocab_rows
        return Student(self.network, vocab_size=size, is_described=self.is_described, compiled=compiled)


def open_teacher(section: TeacherConfig, dtype: torch.dtype, tokenizer: Any = None) -> LoadedModel:
    """Load a model that is only asked, with its tokenizer, and try it."""
    tokenizer = tokenizer or load_tokenizer(section, section.model)
    network, notes = load_teacher(section, dtype)
    return tried(network, tokenizer, name=section.model, role="teacher", notes=notes)


def open_student(section: StudentConfig, tokenizer: Any, *, seed: int) -> LoadedModel:
    network, notes = load_student(section, seed=seed)
    return tried(network, tokenizer, name=section.model, role="student", notes=notes)


def tried(network: Any, tokenizer: Any, *, name: str, role: str, notes: Sequence[str] = ()) -> LoadedModel:
    """Ask a network a few tokens and say what it is, or refuse it.

    The random state, the weights and the mode of the network are afterwards what they were before.
    """
    told = [*notes]
    with (
        explained(name, "network"),
        torch.random.fork_rng(devices=[]),
        _at_rest(network),
        _in_fp32(network, told, role),
    ):
        found = anatomy_of(network)
        _check_sizes(found, name)
        check_rows(tokenizer, found.vocab_rows, int(network.get_input_embeddings().weight.shape[0]), name)
        ids = _two_rows(network, tokenizer, found)
        tolerance = _TOLERANCE.get(network.get_output_embeddings().weight.dtype, _HALF_TOLERANCE)
        own = _answers(network, ids, name)
        _check_causality(network, ids, own, tolerance, name)
        _choose_attention(network, ids, own, tolerance, told, role)
        error = head_error(network, ids)
        if role == "student":
            _check_training(network, ids)
    is_described = error <= tolerance
    if not is_described:
        told.append(
            f"the {role}'s head is not one we can describe (logits differ by {error:.2g} of their spread): "
            "its own logits are used, which keeps a [tokens, vocabulary] tensor"
        )
    return LoadedModel(network, tokenizer, found, is_described, tuple(told))


def _check_sizes(found: Anatomy, name: str) -> None:
    sizes = {"layers": found.num_layers, "width": found.width, "vocabulary": found.vocab_rows}
    wrong = {part: size for part, size in sizes.items() if size < 1}
    if wrong:
        told = ", ".join(f"{part} {size:,}" for part, size in wrong.items())
        raise BrokenAtStart(f"{name} is of no size: {told}", advice=["check its config.json"])


def _two_rows(network: Any, tokenizer: Any, found: Anatomy) -> Tensor:
    """Two rows of ordinary tokens, drawn from the whole vocabulary, that part in the middle. [2, L]"""
    limit = int(getattr(network.config.get_text_config(), "max_position_embeddings", 0) or _LENGTH)
    length = max(2, min(_LENGTH, limit))
    special = set(tokenizer.all_special_ids) if tokenizer is not None else set()
    known = tokenizer.get_vocab().values() if tokenizer is not None else range(found.vocab_rows)
    ordinary = torch.tensor(sorted(set(known) - special) or sorted(known))
    generator = torch.Generator().manual_seed(_SEED)
    first, second = ordinary[torch.randint(len(ordinary), (2, length), generator=generator)]
    second[: length // 2] = first[: length // 2]
    # A vocabulary so small that the halves may be drawn alike still has another token to offer.
    second[-1] = ordinary[(int((ordinary == first[-1]).nonzero()[0]) + 1) % len(ordinary)]
    return torch.stack([first, second]).to(next(network.parameters()).device)


@torch.no_grad()
def _answers(network: Any, ids: Tensor, name: str) -> Tensor:
    logits: Tensor = network(input_ids=ids, use_cache=False).logits.float()
    if bool(torch.isfinite(logits).all()):
        return logits
    broken = [part for part, weight in network.named_parameters() if not bool(torch.isfinite(weight).all())]
    raise BrokenAtStart(
        f"{name} answers with values that are not finite"
        + (f"; not finite: {', '.join(broken[:4])}" if broken else ""),
        advice=["check the model folder", "load it in float32: --set teacher.dtype=float32"],
    )


def _check_causality(network: Any, ids: Tensor, own: Tensor, tolerance: float, name: str) -> None:
    """Refuse a network whose earlier answers change with a later token: its targets would be in its input."""
    shared = ids.shape[1] // 2
    seen = own
    if float(own.std()) == 0.0:  # a head of zeros says nothing, the states below it do
        with torch.no_grad():
            seen = backbone(network)(input_ids=ids, use_cache=False).last_hidden_state.float()
    change = _change(seen[0, :shared], seen[1, :shared])
    if change <= tolerance / 10:  # the two rows share one product: what is alike in them hardly differs by rounding
        return
    if _change(_answers(network, ids, name), own) > tolerance / 10:
        raise BrokenAtStart(
            f"{name} does not answer the same text alike twice: it cannot be compared with anything",
            advice=["use a model that draws nothing at random in evaluation mode"],
        )
    raise BrokenAtStart(
        f"{name} is not causal: a later token changes its earlier answers by {change:.2g} of their spread, so it sees "
        "what it is asked to predict",
        where=type(network).__name__,
        advice=["use a decoder-only language model", "an encoder made to decode has is_decoder = true in config.json"],
    )


@torch.no_grad()
def _check_training(network: Any, ids: Tensor) -> None:
    """Some networks ask for more inputs when they are trained: they fail here and not at the first step."""
    network.train()
    network(input_ids=ids, use_cache=False)
    network.eval()


def _choose_attention(network: Any, ids: Tensor, own: Tensor, tolerance: float, told: list[str], role: str) -> None:
    """Maskless causal attention where it gives the network's own answers, else the attention it came with."""
    if not attend_causally(network):
        return
    change = _change(_answers(network, ids, role), own)
    if change > tolerance:
        network.set_attn_implementation("sdpa")
        told.append(f"the {role} keeps its own attention masks: without them its answers change by {change:.2g}")


def _change(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.std().clamp_min(1e-6))


@contextmanager
def _at_rest(network: Any) -> Iterator[None]:
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


@contextmanager
def _in_fp32(network: Any, told: list[str], role: str) -> Iterator[None]:
    """The network's floating-point tensors in FP32 in the body, and the very same tensors as before after it.

    In half precision rounding hides small differences. Where FP32 does not fit, the trial is said to be a coarse one.
    """
    tensors = [*network.parameters(), *network.buffers()]
    halves = [tensor for tensor in tensors if tensor.dtype in (torch.float16, torch.bfloat16)]
    needed = 4 * sum(tensor.numel() for tensor in halves)
    if needed > _FREE_SHARE * _free_bytes(tensors[0].device):
        told.append(f"the {role} was tried in half precision: {needed / 1e9:.1f} GB for FP32 are not free")
        halves = []
    kept = [tensor.data for tensor in halves]
    for tensor in halves:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, data in zip(halves, kept, strict=True):
            tensor.data = data


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
