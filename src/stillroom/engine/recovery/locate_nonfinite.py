"""Name the first non-finite tensor of a step: a weight, a module's output, a loss term, or a gradient.

A slow path, for refused steps only. It runs the window's micro-batches again with a hook on every module. A fault that
does not repeat is found in the weights and gradients it left, or reported as gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.engine.run import Run
from stillroom.types import Batch, DenseSignal, Lesson


@torch.no_grad()
def locate(run: Run, window: Sequence[Batch], lesson: Lesson) -> str:
    """A sentence that names the first non-finite tensor, in the order of computation."""
    for name, parameter in run.student.model.named_parameters():
        if not _is_finite(parameter):
            return f"weight {name} of the student is not finite"
    for name, parameter in run.mix.projectors.named_parameters():
        if not _is_finite(parameter):
            return f"projector {name} is not finite"
    for batch in window:
        fault = _in_forward(run, batch, lesson) if batch.num_scored else ""
        if fault:
            return fault
    # Backward goes from the last layer to the first, so the last bad gradient was computed first.
    for name, gradient in reversed(list(run.optimizer.named_gradients())):
        if not _is_finite(gradient):
            return f"the gradient of {name} is not finite, though the forward pass is"
    return "nothing is left of it: the step is finite when it is computed again"


def _in_forward(run: Run, batch: Batch, lesson: Lesson) -> str:
    batch = batch.to(run.device)
    needs = run.mix.needs(lesson)
    signal = run.teacher_of(lesson, batch).observe(batch, needs.teacher)
    if isinstance(signal, DenseSignal) and not _is_finite(signal.hidden):
        return "the teacher's last hidden states are not finite"
    first: list[str] = []

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
            if not first and isinstance(tensor, Tensor) and not _is_finite(tensor):
                first.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in run.student.model.named_modules() if name]
    was_training = run.student.model.training
    run.student.eval()
    try:
        with run.precision.autocast():
            view = run.student.observe(batch, needs.student)
    finally:
        run.student.model.train(was_training)
        for handle in handles:
            handle.remove()
    if first:
        return f"the output of {first[0]} of the student is not finite"
    score = run.mix.score(view, signal, batch, lesson, run.mix.counts([batch]))
    for name, term in score.terms.items():
        if not _is_finite(term.total):
            return f"the {name} term is not finite, though student and teacher are"
    return ""


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
