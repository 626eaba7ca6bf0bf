"""One micro-batch on fake tensors: every operation runs on shapes alone, and the bytes alive at once are followed.

Nothing is assumed of a family: what its layers keep for the backward pass is what autograd keeps. Operations whose
result depends on values (a mixture of experts that picks rows) cannot be run on shapes; `Untraceable` is raised.

Legend: B rows, L positions of a row, N = B L scored positions, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stillroom.models.anatomy import backbone
from stillroom.planning.head import HeadPass, HeadShape
from stillroom.planning.live import LiveTensors

ACTIVATIONS, GRADIENTS, HEAD, DATA = "activations", "gradients", "head", "data"
_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_BATCH_TENSORS = 5  # of eight bytes a position: tokens, targets, masks, scored positions and their targets


class Untraceable(Exception):
    """A network that cannot be run on shapes."""


@dataclass(frozen=True)
class StudentTrace:
    """Bytes of a micro-batch beside the student's state."""

    at_peak: dict[str, int]  # by part, when the sum was largest
    kept: int  # for the backward pass: activations and casts, at the end of the forward pass
    casts: int  # of `kept`: half copies of weights
    head_kept: int  # what the head's pool keeps all the time

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())


@dataclass(frozen=True)
class TeacherTrace:
    work: int  # the largest sum while it answers
    answer: int  # hidden states that the objectives read


@contextmanager
def shapes_only(mode: FakeTensorMode) -> Iterator[None]:
    """Tensors made in the body have shapes and no memory. Those of two modes cannot meet."""
    was_silent, _LOG.disabled = _LOG.disabled, True  # torch prints the traceback of what is raised below
    try:
        with mode:
            yield
    except RuntimeError as error:  # values are asked for, or a kernel has no shapes
        raise Untraceable(str(error).partition("\n")[0] or type(error).__name__) from error
    finally:
        _LOG.disabled = was_silent


def trace_student(
    network: Any,
    rows: int,
    length: int,
    *,
    head: HeadShape,
    autocast: torch.dtype | None,
    products: Callable[[], AbstractContextManager[None]] = nullcontext,
    accumulates: bool = False,
) -> StudentTrace:
    """Forward, head and backward of one micro-batch. Call it inside `shapes_only`.

    `products` is how the precision multiplies. `accumulates`: gradients of earlier micro-batches are there.
    """
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    weight = network.get_output_embeddings().weight
    live = LiveTensors([*network.parameters(), *network.buffers()])
    with live:
        with live.part(GRADIENTS):
            sums = _earlier_gradients(trained) if accumulates else []
        before = live.live
        with live.part(DATA):
            batch = [torch.zeros(rows, length, dtype=torch.long) for _ in range(_BATCH_TENSORS)]
        with products():
            with (
                live.part(ACTIVATIONS),
                torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=bool(autocast)),
            ):
                hidden = backbone(network)(input_ids=batch[0], use_cache=False).last_hidden_state
                chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch[1].reshape(-1))
                del hidden
            kept, casts = live.live - before, live.by_part["casts"]
            with live.part(HEAD):
                loss: Tensor = HeadPass.apply(chosen, weight, head)  # type: ignore[no-untyped-call]
            del chosen
            with live.part(GRADIENTS):
                loss.backward()  # type: ignore[no-untyped-call]
        del loss, sums
    for parameter in trained:
        parameter.grad = None
    return StudentTrace(dict(live.at_peak), kept, casts, head.kept_between_passes(weight))


def _earlier_gradients(trained: list[Any]) -> list[Tensor]:
    """Gradients that are added to. Those of FP16 parameters are summed in FP32, and their own let go of."""
    sums = []
    for parameter in trained:
        if parameter.dtype == torch.float16:
            sums.append(torch.zeros_like(parameter, dtype=torch.float32))
            parameter.register_post_accumulate_grad_hook(_let_go)
        else:
            parameter.grad = torch.zeros_like(parameter)
    return sums


def _let_go(parameter: Tensor) -> None:
    parameter.grad = None


@torch.no_grad()
def trace_teacher(network: Any, rows: int, length: int) -> TeacherTrace:
    """The answer to one micro-batch. Call it inside `shapes_only`."""
    live = LiveTensors([*network.parameters(), *network.buffers()])
    with live:
        ids = torch.zeros(rows, length, dtype=torch.long)
        hidden = backbone(network)(input_ids=ids, use_cache=False).last_hidden_state
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, ids.reshape(-1))
    return TeacherTrace(live.peak, chosen.numel() * chosen.element_size())


def estimate_student(network: Any, rows: int, length: int, itemsize: int) -> int:
    """Activations of a network that cannot be traced: 16 widths and 4 widths of the feed-forward a token and layer.

    Of a mixture, each token visits several feed-forwards. An estimate by the usual layers, not a law.
    """
    config = network.config.get_text_config()
    visited = int(getattr(config, "num_experts_per_tok", 0) or 1)
    inner = int(getattr(config, "moe_intermediate_size", 0) or getattr(config, "intermediate_size", 0) or 0)
    inner = inner or 4 * int(config.hidden_size)
    each = 16 * int(config.hidden_size) + 4 * visited * inner
    return rows * length * int(config.num_hidden_layers) * each * itemsize
