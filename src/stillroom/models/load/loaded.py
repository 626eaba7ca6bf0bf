"""Load a model and test it before use.

Run it once on a few tokens: does an earlier output depend on a later token, does the described head give the model's
own logits, does maskless attention give the same outputs? Conclude nothing from the name of its family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
# In standard deviations of the logits. FP32 outputs differ by the order of summation, half precision by rounding too.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 0.05


@dataclass(frozen=True)
class LoadedModel:
    """A tested network with its tokenizer."""

    network: Any
    tokenizer: Any
    anatomy: Anatomy
    is_described: bool  # `head` gives the network's own logits; if False, use the network's logits
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # entries for the summary of a run

    @property
    def head(self) -> HeadWeights:
        """The network's head. Valid only if `is_described`."""
        return head_of(self.network)

    def as_student(self, vocab_size: int | None = None, compiled: CompiledBody | None = None) -> Student:
        """The network as a student, over its own vocabulary or `vocab_size` ids shared with another model."""
        size = vocab_size or self.anatomy.vocab_rows
        return Student(self.network, vocab_size=size, is_described=self.is_described, compiled=compiled)


def open_teacher(section: TeacherConfig, dtype: torch.dtype, tokenizer: Any = None) -> LoadedModel:
    """Load a model for inference, with its tokenizer, and test it."""
    tokenizer = tokenizer or load_tokenizer(section, section.model)
    network, notes = load_teacher(section, dtype)
    return try_model(network, tokenizer, name=section.model, role="teacher", notes=notes)


def open_student(
    section: StudentConfig,
    tokenizer: Any,
    *,
    seed: int,
    change: Callable[[Any], list[str]] = lambda _network: [],
) -> LoadedModel:
    """Load the student and test it. `change` is made before the test, and returns notes."""
    network, notes = load_student(section, seed=seed)
    notes += change(network)
    return try_model(network, tokenizer, name=section.model, role="student", notes=notes)


def try_model(network: Any, tokenizer: Any, *, name: str, role: str, notes: Sequence[str] = ()) -> LoadedModel:
    """Test a network on a few tokens; raise if it cannot be used.

    The random state, the weights and the mode of the network are restored.
    """
    all_notes = [*notes]
    with (
        explained(name, "network"),
        torch.random.fork_rng(devices=[]),
        in_eval_mode(network),
        _in_fp32(network, all_notes, role),
    ):
        anatomy = anatomy_of(network)
        _check_sizes(anatomy, name)
        check_rows(tokenizer, anatomy.vocab_rows, int(network.get_input_embeddings().weight.shape[0]), name)
        ids = _two_texts(network, tokenizer, anatomy)
        tolerance = _TOLERANCE.get(network.get_output_embeddings().weight.dtype, _HALF_TOLERANCE)
        own = _answers(network, ids, name)
        _check_causality(network, ids, own, tolerance, name)
        _choose_attention(network, ids, own, tolerance, all_notes, role)
        error = head_error(network, ids)
        if role == "student":
            _check_training(network, ids, name)
    is_described = error <= tolerance
    if not is_described:
        all_notes.append(
            f"the {role}'s head is not one we can describe (logits differ by {error:.2g} of their spread): "
            "its own logits are used, which keeps a [tokens, vocabulary] tensor"
        )
    return LoadedModel(network, tokenizer, anatomy, is_described, tuple(all_notes))


def _check_sizes(anatomy: Anatomy, name: str) -> None:
    sizes = {"layers": anatomy.num_layers, "width": anatomy.width, "vocabulary": anatomy.vocab_rows}
    wrong = {part: size for part, size in sizes.items() if size < 1}
    if wrong:
        listed = ", ".join(f"{part} {size:,}" for part, size in wrong.items())
        raise BrokenAtStart(f"{name} is of no size: {listed}", advice=["check its config.json"])


def _two_texts(network: Any, tokenizer: Any, anatomy: Anatomy) -> Tensor:
    """Two sequences of random ordinary tokens whose first halves are equal. [2, L]"""
    limit = int(getattr(network.config.get_text_config(), "max_position_embeddings", 0) or _LENGTH)
    length = max(2, min(_LENGTH, limit))
    special = set(tokenizer.all_special_ids) if tokenizer is not None else set()
    ids = tokenizer.get_vocab().values() if tokenizer is not None else range(anatomy.vocab_rows)
    ordinary = torch.tensor(sorted(set(ids) - special) or sorted(ids))
    generator = torch.Generator().manual_seed(_SEED)
    first, second = ordinary[torch.randint(len(ordinary), (2, length), generator=generator)]
    second[: length // 2] = first[: length // 2]
    # With a tiny vocabulary the second halves may be equal too: make the last token differ.
    second[-1] = ordinary[(int((ordinary == first[-1]).nonzero()[0]) + 1) % len(ordinary)]
    return torch.stack([first, second]).to(next(network.parameters()).device)


@torch.no_grad()
def _answers(network: Any, ids: Tensor, name: str) -> Tensor:
    logits: Tensor = network(input_ids=ids, use_cache=False).logits.float()
    if bool(torch.isfinite(logits).all()):
        return logits
    here = [(part, weight) for part, weight in network.named_parameters() if not weight.is_meta]
    broken = [part for part, weight in here if not bool(torch.isfinite(weight).all())]
    raise BrokenAtStart(
        f"{name} answers with values that are not finite"
        + (f"; not finite: {', '.join(broken[:4])}" if broken else ""),
        advice=not_finite_advice(network.get_output_embeddings().weight.dtype),
    )


def not_finite_advice(dtype: torch.dtype) -> list[str]:
    """What to try where a teacher's answers are not finite. FP32 helps one that is not in it."""
    is_whole = dtype in (torch.float32, torch.float64)
    return [*([] if is_whole else ["load it in float32: --set teacher.dtype=float32"]), "check the model folder"]


def _check_causality(network: Any, ids: Tensor, own: Tensor, tolerance: float, name: str) -> None:
    """Refuse a network whose earlier outputs depend on a later token: it would see its targets."""
    shared = ids.shape[1] // 2
    seen = own
    if float(own.std()) == 0.0:  # a head of zeros: compare hidden states
        with torch.no_grad():
            seen = backbone(network)(input_ids=ids, use_cache=False).last_hidden_state.float()
    change = _change(seen[0, :shared], seen[1, :shared])
    if change <= tolerance / 10:  # both are in one batch, so equal inputs hardly differ by rounding
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
def _check_training(network: Any, ids: Tensor, name: str) -> None:
    """Run it in training mode, twice from one random state: what needs more inputs, or cannot be repeated, fails here.

    Reformer seeds its hashes from the machine: a run of it that is resumed is another run.
    """
    network.train()
    answers = []
    for _ in range(2):
        torch.manual_seed(_SEED)
        answers.append(network(input_ids=ids, use_cache=False).logits)
    network.eval()
    if not torch.equal(*answers):
        raise BrokenAtStart(
            f"{name} draws numbers in training that do not come from torch's random state: no step could be repeated, "
            "and no run resumed",
            where=type(network).__name__,
            advice=["use a student of another family"],
        )


def _choose_attention(network: Any, ids: Tensor, own: Tensor, tolerance: float, notes: list[str], role: str) -> None:
    """Use maskless causal attention if it gives the network's own outputs, else keep the network's attention."""
    if not attend_causally(network):
        return
    change = _change(_answers(network, ids, role), own)
    if change > tolerance:
        network.set_attn_implementation("sdpa")
        notes.append(f"the {role} keeps its own attention masks: without them its answers change by {change:.2g}")


def _change(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.std().clamp_min(1e-6))


@contextmanager
def in_eval_mode(network: Any) -> Iterator[None]:
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


@contextmanager
def _in_fp32(network: Any, notes: list[str], role: str) -> Iterator[None]:
    """Cast the network to FP32 in the body, and restore the original tensors after it.

    In half precision rounding hides small differences. If FP32 does not fit, note that the test is coarse.
    """
    tensors = [*network.parameters(), *network.buffers()]
    halves = [tensor for tensor in tensors if tensor.dtype in (torch.float16, torch.bfloat16)]
    needed = 4 * sum(tensor.numel() for tensor in halves if not tensor.is_meta)  # on meta: a layer that is streamed
    if needed > _FREE_SHARE * _free_bytes(tensors[0].device):
        notes.append(f"the {role} was tried in half precision: {needed / 1e9:.1f} GB for FP32 are not free")
        halves = []
    originals = [tensor.data for tensor in halves]
    for tensor in halves:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, data in zip(halves, originals, strict=True):
            tensor.data = data


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
