"""Which row kernel runs, and why.

`plain` is PyTorch, operation by operation. `compiled` is C++ built on this machine for a CPU, and what torch.compile
makes of the plain kernel for a CUDA card. `auto` takes the compiled one wherever it can be built and its numbers agree
with the plain one's. The environment variable STILLROOM_KERNEL overrules `auto`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from typing import Literal

import torch

from stillroom.core.errors import ConfigError
from stillroom.losses import divergences
from stillroom.losses.divergences import Divergence
from stillroom.losses.head.compiled import LEAST_CAPABILITY, CompiledKernel, InductorKernel, build, knows
from stillroom.losses.head.rows import Logits, PlainKernel, RowKernel, RowPlan, RowRecord

KernelName = Literal["auto", "plain", "compiled"]


@dataclass(frozen=True)
class KernelChoice:
    """A row kernel and the reason it was chosen, as a sentence for log and doctor."""

    kernel: RowKernel
    reason: str

    @property
    def name(self) -> str:
        return self.kernel.name


def choose_kernel(name: str = "auto", device: torch.device | None = None) -> KernelChoice:
    """The row kernel of a pass on a device (None: a CPU).

    The same on every call of a process, and after a resume on the same machine.
    """
    asked = os.environ.get("STILLROOM_KERNEL", name) if name == "auto" else name
    if asked == "plain":
        return KernelChoice(PlainKernel(), "asked for")
    if asked not in ("auto", "compiled"):
        raise ConfigError(f"no kernel is called {asked!r}", advice=["one of auto, plain, compiled"])
    is_card = device is not None and device.type == "cuda"
    choice = _fused(device) if is_card and device is not None else _compiled()
    if asked == "compiled" and choice.name == "plain":
        needed = "a torch with Triton, and a card of compute capability 7.0 or more" if is_card else "g++"
        raise ConfigError(
            f"the compiled kernel cannot be had: {choice.reason}",
            advice=[f"install {needed}", "set the kernel to plain"],
        )
    return choice


def describe_kernel(name: str, divergence: Divergence, device_type: str) -> str:
    """Which kernel a run's rows go through and why, as a sentence for its log."""
    choice = choose_kernel(name, torch.device(device_type))
    if choice.name == "plain":
        return f"rows of the head: plain PyTorch ({choice.reason})"
    if choice.name == "inductor":
        return f"rows of the head: {choice.reason}; objectives.kernel = 'plain' turns it off"
    if device_type != "cpu":
        return "rows of the head: plain PyTorch (the compiled kernel serves CPUs)"
    if not knows(divergence):
        return f"rows of the head: plain PyTorch (the compiled kernel does not have {divergence.name})"
    return f"rows of the head: compiled ({choice.reason}); objectives.kernel = 'plain' turns it off"


@functools.cache
def _fused(device: torch.device) -> KernelChoice:
    """What torch.compile makes of the plain kernel, tried on the device, or the plain one and the reason."""
    doubt = _doubt_of(device)
    if doubt:
        return KernelChoice(PlainKernel(), doubt)
    return try_fused(device)


def _doubt_of(device: torch.device) -> str:
    """Why Triton cannot serve a card, as far as that is known without trying."""
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, own = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        return f"the card has compute capability {own}, and Triton serves cards from {least} on"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""


def try_fused(device: torch.device) -> KernelChoice:
    """Compile a small problem on a device and compare it with the plain kernel's answer."""
    kernel = InductorKernel()
    try:
        agrees = _agree(kernel, PlainKernel(), device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError, ImportError) as error:  # whatever Triton, its compiler or the driver cannot do
        first = str(error).strip().partition("\n")[0]
        return KernelChoice(PlainKernel(), f"torch.compile failed: {type(error).__name__}: {first}")
    if not agrees:
        return KernelChoice(PlainKernel(), "the numbers of torch.compile's kernel differ from the plain one's")
    return KernelChoice(InductorKernel(), "fused by torch.compile")


@functools.cache
def _compiled() -> KernelChoice:
    built = build()
    if built.path is None:
        return KernelChoice(PlainKernel(), built.reason)
    try:
        kernel = CompiledKernel(built.path)
    except (OSError, AttributeError) as error:
        return KernelChoice(PlainKernel(), f"the compiled kernel does not load: {error}")
    if not _agree(kernel, PlainKernel(), torch.device("cpu")):
        return KernelChoice(PlainKernel(), "the compiled kernel's numbers differ from the plain one's")
    return KernelChoice(kernel, built.reason)


def _agree(one: RowKernel, other: RowKernel, device: torch.device) -> bool:
    """Whether two kernels give the same values and gradients on a small problem: a miscompiled one is not used."""
    answers = []
    for kernel in (one, other):
        generator = torch.Generator().manual_seed(0)
        student, teacher = ((torch.randn(3, 97, generator=generator) * 4).to(device) for _ in range(2))
        third = torch.full((3,), 1 / 3, device=device)
        rows = RowRecord(
            targets=torch.tensor([0, 50, 96], device=device),
            temperatures=torch.tensor([1.0, 2.0, 0.7], device=device),
            kd_weights=third,
            ce_weights=third,
            kd=torch.zeros_like(third),
            ce=torch.zeros_like(third),
            is_bad=torch.zeros(3, dtype=torch.bool, device=device),
        )
        plan = RowPlan(
            divergences.make("jsd"), has_ce=True, is_unit_temperature=False, wants_student=True, wants_teacher=False
        )
        kernel.run(Logits(student, softcap=20.0), Logits(teacher), rows, plan)
        answers.append(torch.cat((rows.kd, rows.ce, student.flatten())).cpu())
    return torch.allclose(answers[0], answers[1], rtol=1e-4, atol=1e-6)
