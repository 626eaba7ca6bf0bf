"""The compiled row kernel and the plain one are the same function, and both are float64 to rounding."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from torch import Tensor

from stillroom.core.errors import ConfigError, DataError
from stillroom.core.types import SampledSignal, TopKSignal
from stillroom.losses import divergences
from stillroom.losses.divergences import Divergence
from stillroom.losses.head.kernel import choose_kernel
from stillroom.losses.head.loss import DenseTeacher, fused_head_loss
from stillroom.losses.head.rows import Logits, PlainKernel, RowKernel, RowPlan, RowRecord, TeacherRows

CHOICE = choose_kernel("auto")
needs_compiler = pytest.mark.skipif(CHOICE.name != "compiled", reason=CHOICE.reason)
MEMBERS = [
    divergences.make("forward_kl"),
    divergences.make("reverse_kl"),
    divergences.make("jsd", {"beta": 0.5}),
    divergences.make("jsd", {"beta": 0.05}),
    divergences.make("skew_forward_kl"),
    divergences.make("skew_reverse_kl"),
    divergences.make("total_variation"),
]
HEADS = {"bare": {}, "scale": {"scale": 0.3}, "softcap": {"softcap": 5.0, "scale": 0.5}, "bias": {"bias": True}}


def draw(seed: int, *shape: int, spread: float = 3.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def teacher_of(kind: str, num_rows: int, num_tokens: int, temperatures: Tensor, seed: int = 1) -> TeacherRows | None:
    logits = draw(seed, num_rows, num_tokens)
    log_probs = torch.log_softmax(logits / temperatures[:, None], -1)
    if kind == "dense":
        return Logits(logits)
    if kind == "top-k":
        ids = log_probs.topk(min(8, num_tokens)).indices
        rest = torch.logsumexp(log_probs.scatter(-1, ids, -math.inf), -1)
        return TopKSignal(ids, log_probs.gather(-1, ids), rest)
    if kind == "sampled":
        ids = torch.randint(num_tokens, (num_rows, 6), generator=torch.Generator().manual_seed(seed))
        weights = torch.softmax(draw(seed, num_rows, 6), -1)
        return SampledSignal(ids, weights, torch.ones(num_rows))
    return None


def run(
    kernel: RowKernel,
    divergence: Divergence | None,
    student: Logits,
    teacher: TeacherRows | None,
    temperatures: Tensor,
    *,
    has_ce: bool = True,
    wants_student: bool = True,
) -> dict[str, Tensor]:
    """Values and gradient of a kernel, on copies."""
    num_rows, num_tokens = student.raw.shape
    student = Logits(student.raw.clone(), student.bias, student.scale, student.softcap)
    if isinstance(teacher, Logits):
        teacher = Logits(teacher.raw.clone(), teacher.bias, teacher.scale, teacher.softcap)
    rows = RowRecord(
        targets=torch.arange(num_rows) * 7 % num_tokens,
        temperatures=temperatures,
        kd_weights=torch.linspace(0.1, 0.7, num_rows),
        ce_weights=torch.linspace(0.6, 0.2, num_rows) * has_ce,
        kd=torch.zeros(num_rows),
        ce=torch.zeros(num_rows),
        is_bad=torch.zeros(num_rows, dtype=torch.bool),
    )
    is_unit = bool((temperatures == 1).all())
    kernel.run(student, teacher, rows, RowPlan(divergence, has_ce, is_unit, wants_student, False))
    answer = {"kd": rows.kd, "is_bad": rows.is_bad}
    if has_ce:
        answer["ce"] = rows.ce
    return answer | ({"gradient": student.raw} if wants_student else {})


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=2e-5, atol=3e-6)


@needs_compiler
@pytest.mark.parametrize("member", MEMBERS, ids=repr)
@pytest.mark.parametrize("kind", ["dense", "top-k"])
@pytest.mark.parametrize("temperature", [1.0, 2.0, None])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_compiled_equals_plain(member: Divergence, kind: str, temperature: float | None, head: dict[str, Any]) -> None:
    num_rows, num_tokens = 6, 301
    temperatures = torch.full((6,), temperature) if temperature else torch.tensor([1.0, 0.6, 1.0, 3.0, 2.0, 1.0])
    bias = draw(3, num_tokens) if head.get("bias") else None
    student = Logits(draw(0, num_rows, num_tokens), bias, head.get("scale", 1.0), head.get("softcap"))
    teacher = teacher_of(kind, num_rows, num_tokens, temperatures)
    for has_ce in (True, False):
        one = run(CHOICE.kernel, member, student, teacher, temperatures, has_ce=has_ce)
        assert_same(one, run(PlainKernel(), member, student, teacher, temperatures, has_ce=has_ce))


@needs_compiler
@pytest.mark.parametrize("kind", ["sampled", "none"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_compiled_equals_plain_for_samples_and_for_labels_alone(kind: str, temperature: float) -> None:
    temperatures = torch.full((5,), temperature)
    student, teacher = Logits(draw(0, 5, 4099), softcap=8.0), teacher_of(kind, 5, 4099, temperatures)
    divergence = MEMBERS[0] if teacher is not None else None
    assert_same(
        run(CHOICE.kernel, divergence, student, teacher, temperatures),
        run(PlainKernel(), divergence, student, teacher, temperatures),
    )


@needs_compiler
@pytest.mark.parametrize("kind", ["dense", "top-k", "sampled"])
def test_bad_teacher_rows_are_the_same_rows(kind: str) -> None:
    temperatures = torch.full((6,), 2.0)
    teacher = teacher_of(kind, 6, 50, temperatures)
    if isinstance(teacher, Logits):
        teacher.raw[1, 3] = math.nan
        teacher.raw[2, 4] = math.inf
        teacher.raw[4] = -math.inf
        teacher.raw[5, 7:] = -math.inf  # not bad: these tokens cannot come
    elif isinstance(teacher, TopKSignal):
        teacher.log_probs[1, 3] = math.nan
        teacher.tail_log_mass[2] = math.inf
        teacher.log_probs[4], teacher.tail_log_mass[4] = -math.inf, -math.inf
    else:
        assert isinstance(teacher, SampledSignal)
        teacher.weights[1, 3], teacher.entropy[2], teacher.weights[4] = math.nan, math.inf, math.nan
    for has_ce in (True, False):
        student = Logits(draw(0, 6, 50))
        one = run(CHOICE.kernel, MEMBERS[0], student, teacher, temperatures, has_ce=has_ce)
        assert one["is_bad"].tolist() == [False, True, True, False, True, False]
        assert one["gradient"].isfinite().all()
        assert_same(one, run(PlainKernel(), MEMBERS[0], student, teacher, temperatures, has_ce=has_ce))


@needs_compiler
@pytest.mark.parametrize("member", MEMBERS, ids=repr)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_extremes_are_the_same(member: Divergence, temperature: float) -> None:
    student = torch.tensor([[1e4, 0.0, -1e4, 5.0], [0.0, 0.0, 0.0, 0.0], [-3e4, 3e4, 0.0, 1.0], [300.0, 0.0, 0.0, 1.0]])
    teacher = torch.tensor(
        [[-1e4, 1e4, 0.0, 2.0], [0.0, -math.inf, -math.inf, -math.inf], [1.0, 2.0, 3e4, -math.inf], [0.0, 300, 1, 2]]
    )
    temperatures = torch.full((4,), temperature)
    ids = torch.tensor([[0], [1], [1], [0]])
    sparse = TopKSignal(ids, torch.full((4, 1), -0.5), torch.full((4,), math.log1p(-math.exp(-0.5))))
    for answer in (Logits(teacher), sparse):
        one = run(CHOICE.kernel, member, Logits(student), answer, temperatures)
        other = run(PlainKernel(), member, Logits(student), answer, temperatures)
        assert one["kd"].isfinite().all()
        assert_same(one, other)


@needs_compiler
def test_a_student_that_is_not_finite_is_not_hidden() -> None:
    for spoil in (math.nan, math.inf):
        logits = draw(0, 2, 40)
        logits[1, 17] = spoil
        for kind in ("dense", "top-k", "sampled"):
            answer = run(
                CHOICE.kernel, MEMBERS[0], Logits(logits), teacher_of(kind, 2, 40, torch.ones(2)), torch.ones(2)
            )
            assert answer["kd"].isfinite().tolist() == [True, False]
            assert not answer["is_bad"].any()


@needs_compiler
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_rows_do_not_see_each_other(num_rows: int) -> None:
    temperatures = torch.full((num_rows,), 2.0)
    student, teacher = Logits(draw(0, num_rows, 129)), teacher_of("dense", num_rows, 129, temperatures)
    assert isinstance(teacher, Logits)
    whole = run(CHOICE.kernel, MEMBERS[0], student, teacher, temperatures)
    alone = run(CHOICE.kernel, MEMBERS[0], student.rows(slice(0, 1)), teacher.rows(slice(0, 1)), temperatures[:1])
    assert torch.equal(whole["kd"][:1], alone["kd"])


@pytest.mark.parametrize("kernel", ["plain", "auto"])
def test_a_target_outside_the_vocabulary_is_refused(kernel: str) -> None:
    hidden, weight = draw(0, 3, 4), draw(1, 11, 4)
    for validate, error in ((True, ConfigError), (False, DataError)):
        with refused(error, "", "11"):
            fused_head_loss(
                hidden,
                weight,
                None,
                torch.tensor([1, 11, 2]),
                kd_weight=0.0,
                kernel=kernel,  # type: ignore[arg-type]
                validate=validate,
            )


@pytest.mark.parametrize("kernel", ["plain", "auto"])
@pytest.mark.parametrize("num_tokens", [5_001, 151_936])
@pytest.mark.parametrize("spread", [0.05, 0.25])
def test_large_vocabularies_match_float64(kernel: str, num_tokens: int, spread: float) -> None:
    hidden, weight = draw(0, 4, 32), draw(1, num_tokens, 32, spread=spread)
    teacher = DenseTeacher(draw(2, 4, 48), draw(3, num_tokens, 48, spread=spread))
    targets = torch.arange(4)
    answers = []
    for dtype in (torch.float32, torch.float64):
        leaf = hidden.to(dtype, copy=True).requires_grad_()
        exact = DenseTeacher(teacher.hidden.to(dtype), teacher.weight.to(dtype))
        out = fused_head_loss(leaf, weight.to(dtype), exact, targets, kernel=kernel)  # type: ignore[arg-type]
        out.loss.backward()
        assert leaf.grad is not None
        answers.append((out.loss.detach().double(), leaf.grad.double()))
    torch.testing.assert_close(answers[0][0], answers[1][0], rtol=1e-5, atol=0)
    error = (answers[0][1] - answers[1][1]).abs().max() / answers[1][1].abs().max()
    assert error < 2e-5  # the plain kernel adds 151,936 terms in FP32


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kernel", ["plain", "auto"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_modes_give_the_training_value(kernel: str, mode: Any) -> None:
    num_tokens = 20_000  # several blocks, hence several threads
    hidden, weight = draw(0, 40, 8), draw(1, num_tokens, 8).requires_grad_()
    teacher = DenseTeacher(draw(2, 40, 8), draw(3, num_tokens, 8))
    trained = fused_head_loss(hidden, weight, teacher, torch.arange(40), kernel=kernel)  # type: ignore[arg-type]
    with mode():
        inner = DenseTeacher(teacher.hidden.clone(), teacher.weight)
        scored = fused_head_loss(hidden.clone(), weight, inner, torch.arange(40), kernel=kernel)  # type: ignore[arg-type]
        assert torch.equal(scored.loss, trained.loss.detach())


@pytest.mark.usefixtures("two_threads")
def test_threads_are_left_as_they_were_and_change_nothing() -> None:
    hidden, weight = draw(0, 40, 8), draw(1, 20_000, 8)
    shared = fused_head_loss(hidden, weight, None, torch.arange(40), kd_weight=0.0, kernel="plain")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    alone = fused_head_loss(hidden, weight, None, torch.arange(40), kd_weight=0.0, kernel="plain")
    torch.testing.assert_close(shared.loss, alone.loss)


def test_the_choice_can_be_made_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STILLROOM_KERNEL", "plain")
    assert choose_kernel("auto").name == "plain"
    monkeypatch.setenv("STILLROOM_KERNEL", "fast")
    with refused(ConfigError, "", "fast"):
        choose_kernel("auto")
    assert choose_kernel("plain").reason


def test_without_a_compiler_the_plain_kernel_runs_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from stillroom.losses.head import kernel
    from stillroom.losses.head import kernel as compiled

    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("STILLROOM_KERNEL", raising=False)
    monkeypatch.setattr(kernel, "build", compiled.build.__wrapped__)
    choice = kernel._compiled.__wrapped__()
    assert choice.name == "plain"
    assert "no C++ compiler" in choice.reason
