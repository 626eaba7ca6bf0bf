"""Find the loss scale of an FP16 run before its first step.

A scale that is too large costs one step for each halving. Gradients are proportional to the scale, so one backward
pass of the first micro-batch at a small scale tells which scale fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stillroom.engine.fitting import parts_of, within_memory
from stillroom.engine.run import Run
from stillroom.engine.state import RunState
from stillroom.types import Batch

_PROBE_SCALE = 64.0  # holds gradients up to 1,000; gradients that FP16 rounds to 0 here are small at 65,536 too
_LARGEST = 65504.0 / 8.0  # an eighth of FP16's range: gradients grow in the first steps


_UNWRITTEN = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)  # their memory holds what was there before


_SENT = frozenset({"fsdp", "c10d", "_c10d_functional"})  # what processes send each other: weights, unwritten memory too
_COPIED_OUT = torch.ops.aten.split_with_sizes_copy  # gathered weights


def _is_computed(func: Any) -> bool:
    """Whether an operation returns numbers of its own: not memory as it was found, not a view, nothing gathered."""
    packet = func.overloadpacket
    if packet in _UNWRITTEN or packet is _COPIED_OUT or func.namespace in _SENT:
        return False
    aliases = [one.alias_info for one in func._schema.returns if one.alias_info is not None]
    return not aliases or any(alias.is_write for alias in aliases)


class PeakWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """While active, record the largest magnitude of every FP16 tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._peaks: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if not _is_computed(func):
            return answer
        for tensor in answer if isinstance(answer, (tuple, list)) else (answer,):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float16 and tensor.numel():
                self._peaks.append(tensor.detach().abs().amax().float())
        return answer

    def peak(self) -> float:
        return float(torch.stack(self._peaks).amax()) if self._peaks else 0.0


def find_loss_scale(run: Run, state: RunState) -> None:
    """Lower the configured scale until gradients fit FP16, and log it. Leave weights and random state unchanged."""
    if not run.precision.scales_loss:
        return
    window = run.loader.window(0)
    counts = run.parallel.counts(run.mix.counts(window))
    configured, floor = run.precision.loss_scale, run.precision.scaler.floor
    peak = math.inf
    for probe in sorted({min(_PROBE_SCALE, configured), floor}, reverse=True):
        run.precision.start_at(probe)
        peak = run.parallel.worst(within_memory(run, state, lambda: _peak_at(run, state, window, counts))) / probe
        if math.isfinite(peak):
            break
    scale = fitting_scale(peak, configured, floor)
    run.precision.start_at(scale)
    if scale < configured:
        cause = f"gradients of the first batch reach {peak:.3g}" if math.isfinite(peak) else "the first batch overflows"
        run.log.write("note", text=f"loss scale {scale:,.0f} instead of {configured:,.0f}: FP16 {cause}")


def fitting_scale(peak: float, configured: float, floor: float) -> float:
    """The configured scale, halved until unscaled gradients up to `peak` fit; never below the floor."""
    scale = configured
    while scale > floor and not peak * scale <= _LARGEST:
        scale = max(scale / 2.0, floor)
    return scale


def _peak_at(run: Run, state: RunState, window: Sequence[Batch], counts: dict[str, int]) -> float:
    """The largest FP16 gradient of the first micro-batch at the present scale, in activations and weights."""
    batches = run.parallel.scored(list(parts_of(window, state)))
    if not batches:
        return 0.0
    lesson = run.lesson(state)
    needs = run.mix.needs(lesson)
    batch = batches[0].to(run.device)
    watch = PeakWatch()
    devices = [run.device] if run.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        run.student.train()
        signal = run.teacher_of(lesson, batch).observe(batch, needs.teacher)

        def compute() -> Tensor:
            with run.precision.autocast():
                view = run.student.observe(batch, needs.student)
            return run.mix.score(view, signal, batch, lesson, counts).loss

        loss = run.parallel.trial(compute)
        with watch:
            run.precision.backward(loss)
    run.optimizer.zero_grad()
    return watch.peak()
