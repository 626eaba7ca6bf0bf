"""The head on a CUDA card: for whoever has one. Everything here also runs on a device that only says it is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from divergence_cases import every_member
from half_cases import distance, exact, gradients, near_convergence
from head_cases import Case, make_case, run

from stillroom.core.types import DenseSignal, HeadWeights
from stillroom.losses.divergences import Divergence
from stillroom.losses.head.kernel import choose_kernel
from stillroom.losses.head.rows import forget_free_memory, pass_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")


@pytest.mark.parametrize("mean", [0.0, -20.0, -100.0])
@pytest.mark.parametrize(("teacher_dtype", "bar"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_gradients_on_a_card_are_those_of_float64(teacher_dtype: torch.dtype, bar: float, mean: float) -> None:
    _, expected = exact(near_convergence(mean, teacher_dtype, 2.0), 2.0)
    found = gradients(near_convergence(mean, teacher_dtype, 2.0, device="cuda"), temperature=2.0)
    for name, gradient in found.items():
        assert distance(gradient.cpu(), expected[name]) < bar, name


def test_a_card_multiplies_gradients_by_the_loss_scale_before_it_casts_them() -> None:
    case = near_convergence(0.0, torch.bfloat16, 1.0, device="cuda")
    loss = run(case, kd_weight=2.0**-40, ce_weight=0.0, chunk_tokens=20).loss
    made = [gradient.clone() for gradient in loss.grad_fn.saved_tensors[:2]]
    (loss * 2.0**34).backward()
    for found, gradient in zip((case.hidden.grad, case.head.weight.grad), made, strict=True):
        assert found is not None and found.dtype == torch.float16
        assert torch.equal(found, (gradient * 2.0**34).half())
    assert not gradient.half().any(), "all of it is lost where it is cast first"


@every_member
def test_the_kernel_of_a_card_is_the_plain_one_to_rounding(member: Divergence) -> None:
    case = make_case(2, 9, 301, widths=(16, 16), dtype=torch.float32)

    def on_card(kernel: str) -> dict[str, Any]:
        moved = case.copy(torch.float32)
        hidden, weight = (tensor.detach().cuda().requires_grad_() for tensor in (moved.hidden, moved.head.weight))
        teacher = DenseSignal(moved.teacher.hidden.cuda(), HeadWeights(moved.teacher.head.weight.cuda()))
        placed = Case(hidden, HeadWeights(weight), teacher, case.targets.cuda())
        return {"loss": run(placed, member, kernel=kernel).loss, **gradients(placed, divergence=member, kernel=kernel)}

    plain, chosen = on_card("plain"), on_card("auto")
    assert choose_kernel("auto", torch.device("cuda")).reason
    for name, value in plain.items():
        torch.testing.assert_close(chosen[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_a_pass_holds_no_more_than_it_plans() -> None:
    num_rows, num_tokens, width = 512, 32_000, 64
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).half().cuda()

    hidden, weight = draw(num_rows, width).requires_grad_(), draw(num_tokens, width).requires_grad_()
    signal = DenseSignal(draw(num_rows, width), HeadWeights(draw(num_tokens, width)))
    case = Case(hidden, HeadWeights(weight), signal, torch.zeros(num_rows, dtype=torch.long).cuda())
    forget_free_memory()
    run(case, chunk_tokens=256, kernel="plain")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(case, chunk_tokens=256, kernel="plain")
    gradient_bytes = 4 * (weight.numel() + 8192 * width + hidden.numel())  # and what a chunk adds to it at once
    assert torch.cuda.max_memory_allocated() - before <= pass_bytes(256, num_tokens) + gradient_bytes + 2**21
