"""Laws of the border of `fused_head_loss`: what it cannot compute it refuses by name, alike in both kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from divergence_cases import value_of
from head_cases import Case, make_case
from refusals import refused
from torch import Tensor

from stillroom.core.errors import ConfigError, DataError
from stillroom.core.types import DenseSignal, HeadWeights, TopKSignal
from stillroom.losses import divergences
from stillroom.losses import hidden as distances
from stillroom.losses.head.kernel import choose_kernel
from stillroom.losses.head.loss import DenseTeacher, HeadLoss, SampledTeacher, TopKTeacher, fused_head_loss, score_head
from stillroom.losses.head.rows import Logits, RowPlan, RowRecord, keep_top_k

N, V, K = 7, 13, 4
CHOICE = choose_kernel("auto")
KERNELS = ["plain", "compiled"] if CHOICE.name == "compiled" else ["plain"]
both_kernels = pytest.mark.parametrize("kernel", KERNELS)
Arguments = dict[str, Any]


def dense(**over: Any) -> Arguments:
    """Arguments that are right, in FP32: what the compiled kernel serves."""
    case = make_case(1, N, V, has_bias=True, dtype=torch.float32)
    assert case.teacher.head.bias is not None
    return {
        "student_hidden": case.hidden,
        "student_weight": case.head.weight,
        "student_bias": case.head.bias,
        "teacher": DenseTeacher(case.teacher.hidden, case.teacher.head.weight, case.teacher.head.bias),
        "labels": case.targets,
    } | over


def top_k(**over: Any) -> Arguments:
    given = dense()
    logits = given["teacher"].hidden @ given["teacher"].weight.T
    kept = keep_top_k(logits, K, torch.full((N,), 2.0))
    return given | {"teacher": TopKTeacher(kept.ids, kept.log_probs, kept.tail_log_mass)} | over


def sampled(**over: Any) -> Arguments:
    ids = torch.randint(V, (N, K), generator=torch.Generator().manual_seed(0))
    return dense() | {"teacher": SampledTeacher(ids, torch.full((N, K), 1 / K), torch.ones(N))} | over


def call(given: Arguments, **over: Any) -> HeadLoss:
    return fused_head_loss(**(given | over))


def teacher(given: Arguments, **over: Any) -> Arguments:
    return given | {"teacher": replace(given["teacher"], **over)}


def changed(tensor: Tensor, place: Any, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


def bad(name: str, make: Callable[[], Arguments], match: str) -> Any:
    return pytest.param(make, match, id=name)


T = top_k()["teacher"]
FLAT = math.log(1 / (K + 1))
WRONG = [
    # lengths
    bad("labels of another N", lambda: dense(labels=torch.zeros(N + 1, dtype=torch.long)), r"labels has shape \[8\]"),
    bad("labels (N, 1)", lambda: dense(labels=torch.zeros(N, 1, dtype=torch.long)), r"labels has shape \[7, 1\]"),
    bad("hidden without width", lambda: dense(student_hidden=torch.tensor(1.0)), "student_hidden"),
    bad("hidden no tensor", lambda: dense(student_hidden=[[1.0]]), "student_hidden"),
    bad("width", lambda: dense(student_hidden=torch.zeros(N, 9)), r"student_weight has shape \[13, 4\], and \[V, 9\]"),
    bad("short bias", lambda: dense(student_bias=torch.zeros(3)), r"student_bias has shape \[3\], and \[13\]"),
    bad("long bias", lambda: dense(student_bias=torch.zeros(V + 1)), "student_bias"),
    bad("token_weights (N, 1)", lambda: dense(token_weights=torch.ones(N, 1)), r"token_weights has shape \[7, 1\]"),
    bad("token_weights of another N", lambda: dense(token_weights=torch.ones(N - 1)), "token_weights"),
    bad("token_temperature", lambda: dense(token_temperature=torch.ones(1)), "token_temperature"),
    bad("teacher rows", lambda: teacher(dense(), hidden=torch.zeros(N - 1, 5)), r"teacher.hidden has shape \[6, 5\]"),
    bad("teacher width", lambda: teacher(dense(), hidden=torch.zeros(N, 6)), "teacher.weight"),
    bad("teacher bias", lambda: teacher(dense(), bias=torch.zeros(2)), "teacher.bias"),
    bad("vocabulary", lambda: teacher(dense(), weight=torch.zeros(V + 2, 5), bias=None), "teacher has 15 tokens"),
    bad("ids rows", lambda: teacher(top_k(), ids=T.ids[1:]), r"teacher.ids has shape \[6, 4\]"),
    bad("other K", lambda: teacher(top_k(), log_probs=T.log_probs[:, 1:]), r"teacher.log_probs has shape \[7, 3\]"),
    bad("3-D top-k", lambda: teacher(top_k(), ids=T.ids[None], log_probs=T.log_probs[None]), "teacher.ids"),
    bad("tail (N, 1)", lambda: teacher(top_k(), tail_log_mass=T.tail_log_mass[:, None]), "teacher.tail_log_mass"),
    bad("no ids", lambda: teacher(top_k(), ids=T.ids[:, :0], log_probs=T.log_probs[:, :0]), "0 ids a row"),
    bad("sampled entropy", lambda: teacher(sampled(), entropy=torch.ones(N, 2)), "teacher.entropy"),
    bad("sampled weights", lambda: teacher(sampled(), weights=torch.ones(N)), "teacher.weights"),
    # dtypes and devices
    bad("float labels", lambda: dense(labels=torch.zeros(N)), "labels is float32, and integer numbers"),
    bad("bool labels", lambda: dense(labels=torch.zeros(N, dtype=torch.bool)), "labels is bool"),
    bad("whole hidden", lambda: dense(student_hidden=torch.zeros(N, 4, dtype=torch.long)), "student_hidden is int64"),
    bad("complex weight", lambda: dense(student_weight=torch.zeros(V, 4, dtype=torch.complex64)), "student_weight"),
    bad("float ids", lambda: teacher(top_k(), ids=T.ids.float()), "teacher.ids is float32"),
    bad("whole log_probs", lambda: teacher(top_k(), log_probs=T.ids), "teacher.log_probs is int64"),
    bad("device of labels", lambda: dense(labels=torch.zeros(N, dtype=torch.long, device="meta")), "labels is on meta"),
    bad("device of weight", lambda: dense(student_weight=torch.zeros(V, 4, device="meta")), "student_weight is on"),
    bad("device of teacher", lambda: teacher(dense(), hidden=torch.zeros(N, 5, device="meta")), "teacher.hidden is on"),
    bad("teacher of no kind", lambda: dense(teacher=torch.zeros(N, V)), "teacher is a Tensor"),
    bad("no teacher", lambda: dense(teacher=None), "needs a divergence and a teacher"),
    # numbers
    *[
        bad(f"{name} {value}", lambda name=name, value=value: dense(**{name: value}), name)
        for name, values in {
            "student_softcap": (0.0, -1.0, math.nan, math.inf),
            "student_scale": (0.0, -1.0, math.nan, "1"),
            "temperature": (0.0, -1.0, math.nan, math.inf, torch.tensor(2.0)),
            "kd_weight": (-0.1, math.nan, math.inf),
            "ce_weight": (-0.1, math.nan),
            "chunk_tokens": (-1, 2.5),
            "top_k": (-1, 1.5),
            "vocab_size": (0, V + 1, -1, 3.0),
        }.items()
        for value in values
    ],
    bad("teacher softcap", lambda: teacher(dense(), softcap=0.0), "teacher.softcap is 0"),
    bad("teacher scale", lambda: teacher(dense(), scale=math.nan), "teacher.scale is nan"),
    bad("divergence of no kind", lambda: dense(divergence=3), "unknown divergence 3"),
    bad("unknown divergence", lambda: dense(divergence="cosine"), "no divergence is called 'cosine'"),
    bad("top_k of stored answers", lambda: top_k(top_k=3), "top_k belongs to a dense teacher"),
    # values
    bad("label outside", lambda: dense(labels=torch.full((N,), V)), "position 0: the label 13 lies outside"),
    bad("label below", lambda: dense(labels=changed(dense()["labels"], 5, -1)), "position 5: the label -1"),
    bad("negative weight", lambda: dense(token_weights=changed(torch.ones(N), 2, -1.0)), "position 2: token_weights"),
    bad("NaN weight", lambda: dense(token_weights=changed(torch.ones(N), 2, math.nan)), "token_weights holds nan"),
    bad("cold token", lambda: dense(token_temperature=changed(torch.ones(N), 1, 0.0)), "token_temperature holds 0"),
    bad("NaN token", lambda: dense(token_temperature=changed(torch.ones(N), 1, math.nan)), "token_temperature"),
    bad("id outside", lambda: teacher(top_k(), ids=changed(T.ids, (3, 1), V)), "position 3: the id 13 lies outside"),
    bad("id below", lambda: teacher(top_k(), ids=changed(T.ids, (3, 1), -1)), "the id -1"),
    bad("sampled id", lambda: teacher(sampled(), ids=torch.full((N, K), V)), "the id 13"),
    bad("repeated id", lambda: teacher(top_k(), ids=changed(T.ids, (2, 0), T.ids[2, 1])), "row twice"),
    bad("probabilities", lambda: teacher(top_k(), log_probs=T.log_probs.exp()), "instead of 1"),
    bad("probability of the tail", lambda: teacher(top_k(), tail_log_mass=T.tail_log_mass.exp()), "instead of 1"),
    bad("mass above 1", lambda: teacher(top_k(), tail_log_mass=torch.full((N,), -0.5)), "a mass of"),
    bad("forgotten tail", lambda: teacher(top_k(), tail_log_mass=torch.full((N,), -math.inf)), "a mass of 0"),
    bad("sampled mass", lambda: teacher(sampled(), weights=torch.ones(N, K)), "with a sum of 4"),
    bad("sampled sign", lambda: teacher(sampled(), weights=torch.tensor([[1.5, -0.5, 0, 0]]).expand(N, K)), "-0.5"),
    bad("sampled entropy value", lambda: teacher(sampled(), entropy=torch.full((N,), -3.0)), "an entropy of -3"),
]  # fmt: skip


@both_kernels
@pytest.mark.parametrize(("make", "match"), WRONG)
def test_what_cannot_be_computed_is_refused_by_name(make: Callable[[], Arguments], match: str, kernel: str) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        call(make(), kernel=kernel)
    assert error.value.advice


@both_kernels
@pytest.mark.parametrize("make", [dense, top_k, sampled])
def test_right_arguments_pass_with_and_without_the_look_at_values(make: Callable[[], Arguments], kernel: str) -> None:
    given = make()
    looked, blind = (call(given, kernel=kernel, validate=validate) for validate in (True, False))
    assert torch.equal(looked.loss, blind.loss)


@both_kernels
@pytest.mark.parametrize("make", [top_k, sampled])
def test_what_nobody_looked_at_still_never_reaches_foreign_memory(make: Callable[[], Arguments], kernel: str) -> None:
    far = teacher(make(), ids=torch.full((N, K), 10**12))
    with refused(DataError, "labels, teacher.ids"):
        call(far, kernel=kernel, validate=False)


@pytest.mark.skipif(CHOICE.name != "compiled", reason=CHOICE.reason)
@pytest.mark.parametrize(
    "field", ["targets", "temperatures", "kd_weights", "ids", "log_probs", "tail_log_mass", "bias"]
)
def test_the_compiled_kernel_reads_no_tensor_of_another_length(field: str) -> None:
    """The last line: whoever calls the kernel past the border."""
    rows = RowRecord(
        targets=torch.zeros(N, dtype=torch.long),
        **{name: torch.ones(N) for name in ("temperatures", "kd_weights", "ce_weights", "kd", "ce")},
        is_bad=torch.zeros(N, dtype=torch.bool),
    )
    signal = TopKSignal(torch.arange(K).expand(N, K), torch.full((N, K), FLAT), torch.full((N,), FLAT))
    student = Logits(torch.zeros(N, V), bias=torch.zeros(V))
    short = lambda record: replace(record, **{field: getattr(record, field)[:-1]})  # noqa: E731
    rows = short(rows) if hasattr(rows, field) else rows
    signal = short(signal) if hasattr(signal, field) else signal
    student = short(student) if hasattr(student, field) else student
    plan = RowPlan(divergences.make("jsd"), True, True, True, False)
    with pytest.raises(ValueError, match="rows of the head"):
        CHOICE.kernel.run(student, signal, rows, plan)


# -- what must work ------------------------------------------------------------------------------------------------


def spread(tensor: Tensor) -> Tensor:
    """The same numbers, every second entry of a larger tensor: nothing is contiguous."""
    wide = torch.zeros([2 * length for length in tensor.shape], dtype=tensor.dtype)
    view = wide[tuple(slice(0, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor)


@both_kernels
@pytest.mark.parametrize("make", [dense, top_k, sampled])
def test_tensors_need_not_be_contiguous(make: Callable[[], Arguments], kernel: str) -> None:
    def grads(given: Arguments, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = {name: given[name].detach().clone().requires_grad_() for name in ("student_hidden", "student_weight")}
        answer = given["teacher"]
        fields = {name: change(value) for name, value in vars(answer).items() if isinstance(value, Tensor)}
        out = call(
            given | {name: change(leaf.detach()).requires_grad_() for name, leaf in leaves.items()},
            teacher=replace(answer, **fields),
            labels=change(given["labels"]),
            student_bias=change(given["student_bias"]),
            token_weights=change(torch.linspace(0.5, 1.5, N)),
            kernel=kernel,
        )
        return (out.loss, *(term.total for term in out.terms.values()))

    torch.testing.assert_close(grads(make(), spread), grads(make(), lambda tensor: tensor))


@both_kernels
@pytest.mark.parametrize("make", [dense, top_k, sampled])
def test_gradients_of_strided_tensors_are_those_of_contiguous_ones(make: Callable[[], Arguments], kernel: str) -> None:
    found = []
    for change in (spread, torch.clone):
        given = make()
        hidden = change(given["student_hidden"].T).T.detach().requires_grad_()
        weight = change(given["student_weight"].T).T.detach().requires_grad_()
        call(given, student_hidden=hidden, student_weight=weight, kernel=kernel).loss.backward()
        found.append((hidden.grad, weight.grad))
    torch.testing.assert_close(found[0], found[1])


@both_kernels
@pytest.mark.parametrize("make", [dense, top_k, sampled])
def test_positions_may_keep_their_axes(make: Callable[[], Arguments], kernel: str) -> None:
    given = make()
    answer = given["teacher"]
    own = ("ids", "log_probs", "tail_log_mass", "weights", "entropy", "hidden")
    fields = {name: value[None] for name, value in vars(answer).items() if name in own}
    shaped = given | {
        "student_hidden": given["student_hidden"][None],
        "labels": given["labels"][None],
        "teacher": replace(answer, **fields),
        "token_weights": torch.ones(1, N),
    }
    torch.testing.assert_close(call(shaped, kernel=kernel).loss, call(given, kernel=kernel).loss)
    flat_labels = shaped | {"labels": given["labels"]}
    torch.testing.assert_close(call(flat_labels, kernel=kernel).loss, call(given, kernel=kernel).loss)


@both_kernels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_any_integer_dtype_serves_for_labels_and_ids(dtype: torch.dtype, kernel: str) -> None:
    given = top_k()
    narrow = teacher(given, ids=given["teacher"].ids.to(dtype)) | {"labels": given["labels"].to(dtype)}
    assert torch.equal(call(narrow, kernel=kernel).loss, call(given, kernel=kernel).loss)


@both_kernels
@pytest.mark.parametrize("make", [dense, top_k, sampled])
def test_no_position_at_all_gives_zero_and_zero_gradients(make: Callable[[], Arguments], kernel: str) -> None:
    given = make()
    answer = given["teacher"]
    own = ("ids", "log_probs", "tail_log_mass", "weights", "entropy", "hidden")
    fields = {name: value[:0] for name, value in vars(answer).items() if name in own}
    weight = given["student_weight"].clone().requires_grad_()
    hidden = given["student_hidden"][:0].clone().requires_grad_()
    out = call(
        given, student_hidden=hidden, student_weight=weight, labels=given["labels"][:0], kernel=kernel,
        teacher=replace(answer, **fields), token_weights=torch.ones(0),
    )  # fmt: skip
    out.loss.backward()
    assert out.loss == 0
    assert {name: float(term.count) for name, term in out.terms.items()} == {"kd": 0.0, "ce": 0.0, "fallback": 0.0}
    assert weight.grad is not None and (weight.grad == 0).all()
    assert hidden.grad is not None and hidden.grad.shape == (0, 4)


@both_kernels
def test_half_precision_answers_that_lost_mass_to_rounding_are_not_refused(kernel: str) -> None:
    given = top_k()
    for dtype in (torch.float16, torch.bfloat16):
        answer = given["teacher"]
        coarse = teacher(given, log_probs=answer.log_probs.to(dtype), tail_log_mass=answer.tail_log_mass.to(dtype))
        torch.testing.assert_close(call(coarse, kernel=kernel).loss, call(given, kernel=kernel).loss, rtol=0.02, atol=0)


# -- rows that do not count ----------------------------------------------------------------------------------------


@both_kernels
@pytest.mark.parametrize("make", [dense, top_k, sampled])
def test_a_row_of_weight_zero_may_hold_nan(make: Callable[[], Arguments], kernel: str) -> None:
    given = make()
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0, 0.5, 1.0])
    found = []
    for spoil in (math.nan, 0.0):
        hidden = changed(given["student_hidden"], weights == 0, spoil).requires_grad_()
        weight = given["student_weight"].clone().requires_grad_()
        out = call(given, student_hidden=hidden, student_weight=weight, token_weights=weights, kernel=kernel)
        out.loss.backward()
        assert out.loss.isfinite()
        assert hidden.grad is not None and (hidden.grad[weights == 0] == 0).all()
        assert out.terms["ce"].count == N and out.terms["kd"].count == N
        found.append((out.loss, weight.grad, hidden.grad))
    torch.testing.assert_close(found[0], found[1])


@both_kernels
@pytest.mark.parametrize("ce_weight", [0.0, 0.3])
@pytest.mark.parametrize("make", [dense, top_k, sampled])
def test_the_terms_say_what_a_bad_teacher_row_became(
    make: Callable[[], Arguments], ce_weight: float, kernel: str
) -> None:
    given = make()
    answer = given["teacher"]
    name = {"DenseTeacher": "hidden", "TopKTeacher": "tail_log_mass", "SampledTeacher": "entropy"}[
        type(answer).__name__
    ]
    broken = teacher(given, **{name: changed(getattr(answer, name), [1, 4], math.nan)})
    weights = torch.linspace(0.5, 1.5, N)
    out = call(broken, kd_weight=0.7, ce_weight=ce_weight, token_weights=weights, kernel=kernel)
    assert out.counters["bad_teacher_rows"] == 2
    assert (out.terms["kd"].count, out.terms["fallback"].count) == (N - 2, 2)
    assert out.terms["fallback"].total > 0
    whole = 0.7 * (out.terms["kd"].total + out.terms["fallback"].total)
    whole = whole + (ce_weight * out.terms["ce"].total if ce_weight else 0.0)
    torch.testing.assert_close(out.loss * N, whole)


# -- derivatives ---------------------------------------------------------------------------------------------------


@both_kernels
def test_a_second_derivative_is_refused_and_a_first_is_not(kernel: str) -> None:
    hidden = dense()["student_hidden"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        call(dense(), student_hidden=hidden, kernel=kernel).loss, hidden, create_graph=True
    )
    (plainly,) = torch.autograd.grad(call(dense(), student_hidden=hidden, kernel=kernel).loss, hidden)
    torch.testing.assert_close(gradient, plainly)
    with refused(ConfigError, "stillroom.losses"):
        (gradient.square().sum() + hidden.sum()).backward()


def test_a_second_derivative_of_a_bare_divergence_is_refused() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(value_of("jsd", logits, torch.randn(2, 5)).sum(), logits, create_graph=True)
    with refused(ConfigError, "stillroom.losses"):
        gradient.square().sum().backward()


# -- settings and neighbours ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "settings"),
    [
        ("taid", {"interpolation": 0.3}, {"interpolation": 0.3}),
        ("taid", {}, {}),
        ("alpha_beta", {}, {"alpha": 0.2, "beta": 0.7}),
        ("alpha_beta", {"alpha": 0.5, "beta": 0.1}, {"alpha": 0.5, "beta": 0.1}),
        ("jsd", {}, {"beta": 0.5}),
        ("jsd", {"beta": 0.9}, {"beta": 0.9}),
        ("skew_reverse_kl", {"alpha": 0.4}, {"alpha": 0.4}),
    ],
)
def test_each_divergence_gets_its_own_settings(name: str, given: Arguments, settings: Arguments) -> None:
    made = divergences.make(name, settings)
    assert torch.equal(call(dense(divergence=name, **given)).loss, call(dense(divergence=made)).loss)


def test_values_are_read_once_and_not_at_all_by_the_mix(count_reads: Callable[[], list[str]]) -> None:
    given = top_k(token_weights=torch.ones(N))
    case = Case(
        given["student_hidden"],
        make_case().head,
        DenseSignal(torch.zeros(N, 5), HeadWeights(torch.zeros(V, 5))),
        given["labels"],
    )
    reads = count_reads()
    call(given)
    assert reads == ["tolist"]
    call(given, validate=False)
    assert reads == ["tolist"]
    score_head(
        replace(case.view, head=replace(case.head, weight=given["student_weight"])), case.teacher, case.targets,
        kd_weight=1.0, ce_weight=1.0, divergence=divergences.make("jsd"),
    )  # fmt: skip
    assert reads == ["tolist"]


STATES, MAPS = torch.ones(3, 5), torch.ones(2, 4, 3, 3)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: distances.relative_error(STATES, torch.ones(1, 5)),
        lambda: distances.cosine_distance(STATES, torch.ones(5)),
        lambda: distances.cosine_distance(STATES, torch.ones(3, 5, dtype=torch.long)),
        lambda: distances.attention_distance(MAPS, torch.ones(2, 4, 3, 1), torch.arange(3)),
        lambda: distances.attention_distance(MAPS, torch.ones(1, 4, 3, 3), torch.arange(3)),
        lambda: distances.info_nce(STATES, STATES, torch.ones(2, dtype=torch.bool), 0.1),
        lambda: distances.info_nce(STATES, STATES, torch.ones(3, dtype=torch.bool), 0.0),
        lambda: keep_top_k(STATES, 0, torch.ones(3)),
        lambda: keep_top_k(STATES, 2, torch.ones(1)),
    ],
)
def test_neighbours_refuse_what_they_would_broadcast(ask: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as error:
        ask()
    assert error.value.advice


def test_inner_distances_of_half_precision_states_are_made_in_fp32() -> None:
    large = torch.full((2, 64), 300.0, dtype=torch.float16)  # their squares are infinite in FP16
    for distance in (distances.relative_error, distances.cosine_distance):
        found = distance(large, large)
        assert found.values.dtype == torch.float32
        assert found.values.abs().max() < 1e-6 and not found.is_bad.any()


LOGITS = torch.zeros(3, 5)
BARE = [
    bad("rows", lambda: {"teacher_logits": torch.zeros(1, 5)}, r"teacher_logits has shape \[1, 5\], and \[3, 5\]"),
    bad("tokens", lambda: {"teacher_logits": torch.zeros(3, 6)}, "teacher_logits has shape"),
    bad("no token", lambda: {"student_logits": torch.zeros(3, 0)}, "student_logits"),
    bad("whole", lambda: {"teacher_logits": torch.zeros(3, 5, dtype=torch.long)}, "teacher_logits is int64"),
    bad("device", lambda: {"teacher_logits": torch.zeros(3, 5, device="meta")}, "teacher_logits is on meta"),
    bad("list", lambda: {"student_logits": [0.0]}, "student_logits is list"),
    bad("cold", lambda: {"temperature": 0.0}, "temperature is 0"),
    bad("NaN", lambda: {"temperature": math.nan}, "temperature is nan"),
]


@pytest.mark.parametrize("law", ["forward_kl", "reverse_kl", "jsd", "total_variation"])
@pytest.mark.parametrize(("make", "match"), BARE)
def test_a_bare_divergence_refuses_what_it_cannot_compute(law: str, make: Callable[[], Arguments], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        value_of(law, **({"student_logits": LOGITS, "teacher_logits": LOGITS} | make()))
