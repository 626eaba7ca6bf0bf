"""What torch.compile makes of the plain kernel gives the plain kernel's numbers.

Compiled here for a CPU, which proves the formulas and the handling of sizes; the loops of a card are inductor's own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

from stillroom.losses import divergences
from stillroom.losses.divergences import Divergence
from stillroom.losses.head import kernel
from stillroom.losses.head import kernel as compiled
from stillroom.losses.head.kernel import InductorKernel
from stillroom.losses.head.rows import Logits, PlainKernel, RowKernel, RowPlan, RowRecord

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")
NUM_TOKENS = 203
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def answer(
    kernel: RowKernel, member: Divergence | None, num_rows: int, *, spoiled: bool = False, **head: Any
) -> dict[str, torch.Tensor]:
    """Values and gradient of rows drawn anew, in scratch with a padded stride."""
    generator = torch.Generator().manual_seed(num_rows)
    raw, other = (torch.randn(num_rows, 256, generator=generator)[:, :NUM_TOKENS] * 3 for _ in range(2))
    student, teacher = (torch.zeros(num_rows, 256)[:, :NUM_TOKENS].copy_(values) for values in (raw, other))
    if spoiled:
        teacher[1, 3] = torch.nan
        student[2, 5], teacher[2, 5] = -torch.inf, -torch.inf
    third = torch.full((num_rows,), 1 / 3)
    rows = RowRecord(
        targets=torch.arange(num_rows) * 11,
        temperatures=torch.linspace(0.7, 2.0, num_rows),
        kd_weights=third,
        ce_weights=third * 2,
        kd=torch.zeros(num_rows),
        ce=torch.zeros(num_rows),
        is_bad=torch.zeros(num_rows, dtype=torch.bool),
        clamped=torch.zeros(num_rows) if "clamp" in head else None,
    )
    plan = RowPlan(member, has_ce=True, is_unit_temperature=False, wants_student=True, wants_teacher=False)
    kernel.run(Logits(student, **head), Logits(teacher, **head) if member else None, rows, plan)
    named = {"kd": rows.kd, "ce": rows.ce, "is_bad": rows.is_bad.float(), "gradient": student}
    return named if rows.clamped is None else {**named, "clamped": rows.clamped}


@needs_compiler
@pytest.mark.parametrize("name", ["forward_kl", pytest.param("jsd", marks=pytest.mark.slow)])
def test_fused_rows_equal_plain_ones_whatever_their_number(name: str) -> None:
    fused = InductorKernel()
    counters.clear()
    for num_rows in (6, 9, 4):
        member = divergences.make(name)  # made anew for each pass, as a run does
        expected = answer(PlainKernel(), member, num_rows, spoiled=True)
        found = answer(fused, member, num_rows, spoiled=True)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=2e-5, atol=1e-6, msg=key)
        assert expected["is_bad"].tolist() == [0.0, 1.0] + [0.0] * (num_rows - 2)
    assert counters["stats"]["unique_graphs"] == 1, "compiled once"


@needs_compiler
@pytest.mark.slow
def test_fused_rows_know_bias_scale_cap_and_clamp() -> None:
    head: dict[str, Any] = {"bias": torch.linspace(-1, 1, NUM_TOKENS), "scale": 0.5, "softcap": 5.0, "clamp": 2.0}
    member = divergences.make("forward_kl")
    expected, found = (answer(chosen, member, 5, **head) for chosen in (PlainKernel(), InductorKernel()))
    assert expected["clamped"].sum() > 0
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=2e-5, atol=1e-6, msg=key)


class Recorded:
    """Stands in for the compiled function."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls = 0
        self.error = error

    def __call__(self, *args: Any) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        compiled._run_fused(*args)


def test_a_setting_that_moves_is_left_to_the_plain_kernel_in_the_end() -> None:
    fused, recorded = InductorKernel(), Recorded()
    fused._fused = recorded
    for step in range(20):
        member = divergences.make("jsd", {"beta": 0.1 + step / 100})
        expected, found = answer(PlainKernel(), member, 4), answer(fused, member, 4)
        torch.testing.assert_close(found["gradient"], expected["gradient"])
    assert recorded.calls == 6


def test_a_divergence_that_cannot_be_told_apart_is_left_to_the_plain_kernel() -> None:
    class Unhashable(divergences.ForwardKL):
        __hash__ = None  # type: ignore[assignment]

    fused, recorded = InductorKernel(), Recorded()
    fused._fused = recorded
    expected, found = (answer(chosen, Unhashable(), 4) for chosen in (PlainKernel(), fused))
    assert recorded.calls == 0
    torch.testing.assert_close(found["gradient"], expected["gradient"])


def test_a_single_row_is_left_to_the_plain_kernel() -> None:
    fused, recorded = InductorKernel(), Recorded()
    fused._fused = recorded
    answer(fused, None, 1)
    assert recorded.calls == 0


def test_what_does_not_compile_is_said_once_and_computed_by_the_plain_kernel() -> None:
    fused, recorded = InductorKernel(), Recorded(TorchDynamoException("no such loop"))
    fused._fused = recorded
    member = divergences.make("jsd")
    with pytest.warns(UserWarning, match="plain PyTorch .*no such loop"):
        found = answer(fused, member, 4)
    torch.testing.assert_close(found["gradient"], answer(PlainKernel(), member, 4)["gradient"])
    answer(fused, member, 5)
    assert recorded.calls == 1


# -- which card gets it ------------------------------------------------------------------------------------


def card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, has_triton: bool) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernel, "triton_doubt", lambda: "" if has_triton else "Triton is not installed")
    monkeypatch.delenv("STILLROOM_KERNEL", raising=False)
    kernel._fused.cache_clear()
    return torch.device("cuda:0")


@pytest.mark.parametrize(
    ("capability", "has_triton", "reason"),
    [((5, 2), True, "capability 5.2.*from 6.0 on"), ((7, 5), False, "Triton is not installed")],
)
def test_a_card_that_triton_does_not_serve_has_the_plain_kernel_and_a_reason(
    capability: tuple[int, int], has_triton: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = card(monkeypatch, capability, has_triton=has_triton)
    choice = kernel.choose_kernel("auto", device)
    assert choice.name == "plain"
    with pytest.raises(Exception, match=reason):
        kernel.choose_kernel("compiled", device)
    assert "plain PyTorch (" + choice.reason in kernel.describe_kernel("auto", divergences.make("jsd"), "cuda")
    kernel._fused.cache_clear()


def test_a_card_whose_compiler_fails_has_the_plain_kernel_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: InductorKernel, *args: Any) -> None:
        raise RuntimeError("ptxas is missing\nand more")

    monkeypatch.setattr(InductorKernel, "run", fail)
    choice = kernel.try_fused(CPU)
    assert (choice.name, choice.reason) == ("plain", "torch.compile failed: RuntimeError: ptxas is missing")


def test_a_miscompiled_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: InductorKernel, student: Logits, teacher: Any, rows: RowRecord, plan: RowPlan) -> None:
        PlainKernel().run(student, teacher, rows, plan)
        student.raw.mul_(1.01)

    monkeypatch.setattr(InductorKernel, "run", wrong)
    assert "differ" in kernel.try_fused(CPU).reason


@needs_compiler
@pytest.mark.slow
def test_a_trial_that_agrees_gives_the_fused_kernel() -> None:
    assert kernel.try_fused(CPU).name == "inductor"
