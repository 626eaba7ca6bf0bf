"""Which row kernel runs, and why.

`compiled` is C++ built on this machine, `plain` is PyTorch. `auto` takes the compiled one wherever a compiler is found
and its numbers agree with the plain one. The environment variable STILLROOM_KERNEL overrules `auto`.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Literal

import torch

from stillroom.errors import ConfigError
from stillroom.objectives import divergences
from stillroom.objectives.divergences.base import Divergence
from stillroom.objectives.head.kernel_build import build
from stillroom.objectives.head.kernel_compiled import CompiledKernel, knows
from stillroom.objectives.head.kernel_plain import PlainKernel
from stillroom.objectives.head.row_kernel import Logits, RowKernel, RowPlan, RowRecord

KernelName = Literal["auto", "plain", "compiled"]


@dataclass(frozen=True)
class KernelChoice:
    """A row kernel and the reason it was chosen, as a sentence for log and doctor."""

    kernel: RowKernel
    reason: str

    @property
    def name(self) -> str:
        return self.kernel.name


def choose_kernel(name: str = "auto") -> KernelChoice:
    """The row kernel of a pass. The same on every call of a process, and after a resume on the same machine."""
    asked = os.environ.get("STILLROOM_KERNEL", name) if name == "auto" else name
    if asked == "plain":
        return KernelChoice(PlainKernel(), "asked for")
    if asked not in ("auto", "compiled"):
        raise ConfigError(f"no kernel is called {asked!r}", advice=["one of auto, plain, compiled"])
    choice = _compiled()
    if asked == "compiled" and choice.name != "compiled":
        raise ConfigError(
            f"the compiled kernel cannot be had: {choice.reason}", advice=["install g++", "set the kernel to plain"]
        )
    return choice


def describe_kernel(name: str, divergence: Divergence, device_type: str) -> str:
    """Which kernel a run's rows go through and why, as a sentence for its log."""
    choice = choose_kernel(name)
    if choice.name == "plain":
        return f"rows of the head: plain PyTorch ({choice.reason})"
    if device_type != "cpu":
        return "rows of the head: plain PyTorch (the compiled kernel serves CPUs)"
    if not knows(divergence):
        return f"rows of the head: plain PyTorch (the compiled kernel does not have {divergence.name})"
    return f"rows of the head: compiled ({choice.reason}); objectives.kernel = 'plain' turns it off"


@functools.cache
def _compiled() -> KernelChoice:
    built = build()
    if built.path is None:
        return KernelChoice(PlainKernel(), built.reason)
    try:
        kernel = CompiledKernel(built.path)
    except (OSError, AttributeError) as error:
        return KernelChoice(PlainKernel(), f"the compiled kernel does not load: {error}")
    if not _agree(kernel, PlainKernel()):
        return KernelChoice(PlainKernel(), "the compiled kernel's numbers differ from the plain one's")
    return KernelChoice(kernel, built.reason)


def _agree(one: RowKernel, other: RowKernel) -> bool:
    """Whether two kernels give the same values and gradients on a small problem: a miscompiled one is not used."""
    answers = []
    for kernel in (one, other):
        generator = torch.Generator().manual_seed(0)
        student, teacher = (torch.randn(3, 97, generator=generator) * 4 for _ in range(2))
        third = torch.full((3,), 1 / 3)
        rows = RowRecord(
            targets=torch.tensor([0, 50, 96]),
            temperatures=torch.tensor([1.0, 2.0, 0.7]),
            kd_weights=third,
            ce_weights=third,
            kd=torch.zeros(3),
            ce=torch.zeros(3),
            is_bad=torch.zeros(3, dtype=torch.bool),
        )
        plan = RowPlan(
            divergences.make("jsd"), has_ce=True, is_unit_temperature=False, wants_student=True, wants_teacher=False
        )
        kernel.run(Logits(student, softcap=20.0), Logits(teacher), rows, plan)
        answers.append(torch.cat((rows.kd, rows.ce, student.flatten())))
    return torch.allclose(answers[0], answers[1], rtol=1e-4, atol=1e-6)
