"""Laws of a teacher with trainable gates, outside of any run."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from stillroom.config.schema import ObjectivesConfig, RouterConfig
from stillroom.core.errors import ConfigError
from stillroom.core.types import IGNORED, Batch, DenseSignal, LossWeights, Needs, Score, StudentView, Term
from stillroom.losses.mix import Mix
from stillroom.losses.router import entropy, gate_log_probs, load_balance
from stillroom.models import Student
from stillroom.precision import AdamW, ParameterGroup, resolve
from stillroom.precision.storage import Direct
from stillroom.teachers import GateOptions, RouterTeacher, probe_gates
from stillroom.teachers.placement import Offloaded
from stillroom.teachers.router.terms import Aims, both_ways, lookahead_direction

CPU = torch.device("cpu")
FAMILIES = [
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "phimoe",
]  # fmt: skip


def model_of(family: str, seed: int = 0, **size: Any) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny.config(family, **size)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def batch_of(num_rows: int = 2, length: int = 12, seed: int = 0) -> Batch:
    ids = torch.randint(2, tiny.VOCAB, (num_rows, length), generator=torch.Generator().manual_seed(seed))
    targets = ids.roll(-1, dims=1).clone()
    targets[:, -1] = IGNORED
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    targets[0, -3:] = IGNORED
    return Batch(ids, mask, targets, torch.zeros_like(ids), ("a",) * num_rows, seed)


def teacher_of(model: Any, mode: str = "sar", *, rate: float = 1e-2, said: list[str] | None = None, **over: Any) -> Any:
    config = RouterConfig(**{"mode": mode, "every": 1, **over})
    tell = said.append if said is not None else lambda _text: None
    options = GateOptions(learning_rate=rate)
    return RouterTeacher(
        model, config, vocab_size=tiny.VOCAB, device=CPU, options=options, is_described=True, tell=tell
    )


def student_view(batch: Batch, seed: int = 5) -> StudentView:
    student = Student(model_of("llama", seed, width=24, num_layers=1), vocab_size=tiny.VOCAB, is_described=True)
    with torch.no_grad():
        return student.observe(batch, Needs())


def learn(teacher: Any, batch: Batch, view: StudentView | None = None, **options: Any) -> None:
    teacher.training.begin([batch], 0)
    teacher.training.learn(batch, view, num_targets=batch.num_scored, **options)


def gradients(teacher: Any) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in teacher.gates.weights.items()}


def close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float = 1e-4) -> bool:
    return all(
        torch.allclose(one[name], two[name], atol=tolerance * float(two[name].abs().max()), rtol=0) for name in one
    )


# -- gradients -------------------------------------------------------------------------------------------


def reference(
    model: Any, batch: Batch, view: StudentView, aims: Aims, trained: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The router's loss written out with whole log-softmaxes, and its gradient by autograd on the model's own gates."""
    rows, targets = batch.positions, batch.scored_targets
    with torch.no_grad():
        original = torch.log_softmax(model(batch.input_ids).logits.flatten(0, 1)[rows], -1)
        for name, weight in trained.items():
            model.get_parameter(name).copy_(weight)
    q = torch.log_softmax(view.hidden @ view.head.weight.T, -1)
    gates = {n: p.requires_grad_(True) for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")}
    output = model(batch.input_ids, output_router_logits=True)
    p = torch.log_softmax(output.logits.flatten(0, 1)[rows], -1)
    loss = -aims.truth * p.gather(1, targets.unsqueeze(1)).mean()
    loss = loss + aims.student * (p.exp() * (p - q)).sum(-1).mean()
    loss = loss + aims.anchor * (original.exp() * (original - p)).sum(-1).mean()
    is_token = batch.attention_mask.flatten().bool()
    for logits in output.router_logits:
        probs = torch.softmax(logits[is_token], -1)
        chosen = torch.nn.functional.one_hot(probs.topk(2).indices, 4).float().mean((0, 1))
        balance = 4 * (chosen * probs.mean(0)).sum()
        spread = -(probs * probs.log()).sum(-1).mean()
        loss = loss + (aims.load_balance * balance - aims.entropy * spread) / len(output.router_logits)
    loss.backward()
    return {name: weight.grad.clone() for name, weight in gates.items()}


@pytest.mark.parametrize(
    "weights",
    [(1, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, -1, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 0, 1, 0), (0, 0, 0, 0, 1),
     (1, 0.3, 1, 0.1, 0.1)],
    ids=["truth", "student", "anti-student", "anchor", "balance", "entropy", "all"],
)  # fmt: skip
def test_each_term_has_the_gradient_of_its_formula(weights: tuple[float, ...]) -> None:
    model, batch = model_of("mixtral"), batch_of()
    aims, view = Aims(*weights), student_view(batch)
    teacher = teacher_of(model)
    # Away from the original teacher, where the anchor has a slope too.
    with torch.no_grad():
        for name, weight in teacher.gates.weights.items():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
    learn(teacher, batch, view, aims=aims)
    assert close(gradients(teacher), reference(model, batch, view, aims, teacher.gates.weights))


def test_an_anchored_teacher_stays_nearer_to_the_original() -> None:
    def distance(anchor: float) -> float:
        teacher, batch = teacher_of(model_of("mixtral"), rate=1e-2), batch_of()
        for _ in range(8):
            learn(teacher, batch, aims=Aims(truth=1.0, anchor=anchor))
            teacher.training.update_gates(is_kept=True, rate_factor=1.0)
        found: float = teacher.assess([batch]).kl_to_original
        return found

    assert 0 < distance(100.0) < 0.8 * distance(0.0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("aims", [Aims(truth=1.0), Aims(load_balance=1.0), Aims(entropy=1.0)], ids=["ce", "lb", "h"])
def test_learning_moves_every_gate_and_nothing_else(family: str, aims: Aims) -> None:
    model = model_of(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    teacher = teacher_of(model)
    for seed in range(2):
        learn(teacher, batch_of(seed=seed), aims=aims)
        teacher.training.update_gates(is_kept=True, rate_factor=1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "bit for bit"
    for gate in teacher.moe_gates:
        assert teacher.gates.drift(gate.weight) > 0


def test_eight_micro_batches_equal_one() -> None:
    model, whole = model_of("mixtral"), batch_of(8)
    aims, view = Aims(truth=1.0, student=0.5, anchor=0.0, entropy=0.1), student_view(whole)
    one = teacher_of(model)
    learn(one, whole, view, aims=aims)
    many = teacher_of(model)
    parts = [
        Batch(whole.input_ids[i : i + 1], whole.attention_mask[i : i + 1], whole.targets[i : i + 1],
              whole.target_bytes[i : i + 1], ("a",), i)
        for i in range(8)
    ]  # fmt: skip
    many.training.begin(parts, 0)
    for part in parts:
        many.training.learn(part, student_view(part), num_targets=whole.num_scored, aims=aims)
    assert close(gradients(many), gradients(one), 1e-4)


@pytest.mark.parametrize("option", ["checkpointing", "offload"])
def test_recomputation_and_offload_give_the_same_gradients(option: str) -> None:
    batch = batch_of()
    plain, other = (
        teacher_of(model_of("deepseek_v3")),
        teacher_of(model_of("deepseek_v3"), gradient_checkpointing=option == "checkpointing"),
    )
    if option == "offload":
        other.original._placement = Offloaded(other.original.model, torch.device("cpu"))
    aims = Aims(1.0, 0.3, 1.0, 0.1, 0.1)
    for teacher in (plain, other):
        learn(teacher, batch, student_view(batch), aims=aims)
    assert close(gradients(other), gradients(plain), 1e-6)
    assert all("forward" not in vars(block) for block in other._blocks), "nothing is left behind"


def test_layers_before_the_first_gate_keep_nothing() -> None:
    model = model_of("deepseek_v3")  # its first layer is dense
    teacher, batch = teacher_of(model, "truth"), batch_of()
    needs_grad: list[bool] = []
    handles = [
        block.register_forward_hook(lambda _m, _i, out: needs_grad.append(getattr(out, "requires_grad", False)))
        for block in teacher._blocks
    ]
    learn(teacher, batch)
    for handle in handles:
        handle.remove()
    assert needs_grad[-2:] == [False, True]


# -- one backward for both -------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [1.0, -0.5])
def test_the_joint_backward_reaches_gates_and_student_alike(weight: float) -> None:
    """The gates' gradient of the joint form is that of KL(teacher || student), which is KD with the sides named."""
    model, batch = model_of("mixtral"), batch_of()
    joint = teacher_of(model, "sar-joint", student_weight=weight, truth_weight=0.0, anchor_weight=0.0)
    student = Student(
        model_of("llama", 5, width=24, num_layers=1).requires_grad_(True), vocab_size=tiny.VOCAB, is_described=True
    )
    count = batch.num_scored
    joint.training.begin([batch], 0)
    mix, loss_weights = Mix(ObjectivesConfig()), LossWeights("x", {"kd": 1.0, "ce": 0.0})
    with joint.training.joint_graph(batch):
        (signal,) = joint.training.answers(batch, Needs())
        view = student.observe(batch, Needs())
        score = mix.score(view, signal, batch, loss_weights, {"kd": count, "ce": count})
        (score.loss + joint.training.extra_loss(batch, view, num_targets=count)).backward()
    assert all(p.grad is not None for p in student.model.parameters())
    alternating = teacher_of(model, "sar")
    learn(alternating, batch, student_view(batch), aims=Aims(student=weight))
    assert close(gradients(joint), gradients(alternating))
    joint.training.update_gates(is_kept=True, rate_factor=1.0)
    assert joint.gates.optimizer.num_updates == 1


# -- other experts ---------------------------------------------------------------------------------------


def test_all_experts_change_the_answer_and_train_nothing() -> None:
    model, batch = model_of("mixtral"), batch_of()
    teacher = teacher_of(model, "all-experts")
    assert not torch.equal(teacher.observe(batch, Needs()).hidden, teacher.original.observe(batch, Needs()).hidden)
    learn(teacher, batch)
    teacher.training.update_gates(is_kept=True, rate_factor=1.0)
    assert teacher.gates.optimizer.num_updates == 0


def test_augmented_passes_differ_and_come_again_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillroom.teachers.router.teacher._DRAWN_SHARE", 0.5)  # 0.05 of a tiny batch may be no token
    batch, other = batch_of(), batch_of(seed=3)
    teacher = teacher_of(model_of("mixtral"), "knowledge-augmentation")
    first = [signal.hidden for signal in teacher.training.answers(batch, Needs())]
    teacher.training.answers(other, Needs())
    again = [signal.hidden for signal in teacher.training.answers(batch, Needs())]
    assert len(first) == 2 and not torch.equal(first[0], first[1])
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


def test_a_mode_the_family_cannot_serve_is_refused_when_the_teacher_is_built() -> None:
    with refused(ConfigError, "teacher.router.mode", "PhimoeTopKRouter"):
        teacher_of(model_of("phimoe"), "all-experts")
    with refused(ConfigError, "teacher.router.mode", "all-experts"):
        teacher_of(model_of("jetmoe"), "all-experts")


def test_the_average_of_one_score_is_itself_and_of_two_their_mean() -> None:
    def score(value: float) -> Score:
        return Score(torch.tensor(value), {"kd": Term(torch.tensor(2 * value), torch.tensor(4.0))})

    assert Score.average([score(3.0)]).loss == 3.0
    both = Score.average([score(1.0), score(3.0)])
    assert both.loss == 2.0 and both.terms["kd"].total == 4.0 and both.terms["kd"].count == 4.0


# -- transient offsets and the meta-gradient -------------------------------------------------------------


def kl_to(view: StudentView, signal: DenseSignal) -> float:
    p = torch.log_softmax(signal.hidden @ signal.head.weight.T, -1)
    q = torch.log_softmax(view.hidden @ view.head.weight.T, -1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_a_transient_step_moves_this_answer_alone(weight: float) -> None:
    model, batch = model_of("mixtral"), batch_of()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    teacher = teacher_of(model, "sar-transient", truth_weight=0.0, student_weight=weight)
    view = student_view(batch)
    (moved,) = teacher.training.signals_after_student([], batch, view, Needs())
    plain = teacher.observe(batch, Needs())
    assert not moved.hidden.requires_grad
    assert (kl_to(view, moved) < kl_to(view, plain)) == (weight > 0), "towards the student, or away from it"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(plain.hidden, teacher.original.observe(batch, Needs()).hidden), "nothing is kept"


def test_the_meta_gradient_is_that_of_the_lookahead_batch_after_one_step() -> None:
    """Against its loss after a real student step, differentiated through the step by autograd."""
    model, batch, ahead = model_of("mixtral"), batch_of(), batch_of(seed=9)
    student = Student(
        model_of("llama", 5, width=24, num_layers=1).requires_grad_(True), vocab_size=tiny.VOCAB, is_described=True
    )
    precision = resolve("fp32", "cpu")
    named = tuple(student.model.named_parameters())
    optimizer = AdamW([ParameterGroup("student", 1e-3, named)], store=lambda _n, p: Direct(p))
    optimizer.num_updates = 1
    for cell in optimizer.cells["student"]:
        cell.num_updates.fill_(1)
        cell.second.values.fill_(0.05 * 1e-2)  # after bias correction every coordinate is divided by 0.1
    weights = {name: parameter.detach().clone() for name, parameter in named}
    direction = lookahead_direction(student, optimizer, precision, ahead, rate=1e-3)
    plus, minus = both_ways(student, precision, batch, direction)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in named), "back to the last bit"
    assert all(parameter.grad is None for _name, parameter in named)
    teacher = teacher_of(model, "sar-meta")
    learn(teacher, batch, plus, aims=Aims(student=1.0), opposite=minus)
    found = gradients(teacher)

    rows = batch.positions
    gates = {n: p.requires_grad_(True) for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")}
    p = torch.log_softmax(model(batch.input_ids).logits.flatten(0, 1)[rows], -1)
    with sdpa_kernel(SDPBackend.MATH):  # the fast kernels have no second derivative
        q = torch.log_softmax(student.model(batch.input_ids).logits.flatten(0, 1)[rows], -1)
    kd = (p.exp() * (p.detach() - q)).sum(-1).mean()
    slopes = torch.autograd.grad(kd, [parameter for _n, parameter in named], create_graph=True)
    logits = student.model(ahead.input_ids).logits.flatten(0, 1)[ahead.positions]
    loss = torch.nn.functional.cross_entropy(logits, ahead.scored_targets)
    asked = torch.autograd.grad(loss, [parameter for _n, parameter in named])
    change = -sum((1e-3 * a.detach() / (0.1 + 1e-8) * s).sum() for a, s in zip(asked, slopes, strict=True))
    wanted = dict(zip(gates, torch.autograd.grad(change, list(gates.values())), strict=True))
    assert batch.num_scored and close(found, wanted, 2e-2)


# -- the guard, the alarm, the probe ---------------------------------------------------------------------


def test_a_refused_student_step_leaves_the_gates_alone() -> None:
    teacher, batch = teacher_of(model_of("mixtral")), batch_of()
    learn(teacher, batch, student_view(batch))
    teacher.training.update_gates(is_kept=False, rate_factor=1.0)
    assert teacher.gates.optimizer.num_updates == 0 and not teacher.gates.has_gradient
    assert all(teacher.gates.drift(gate.weight) == 0 for gate in teacher.moe_gates)


def test_a_router_gradient_that_is_not_finite_costs_one_update() -> None:
    said: list[str] = []
    teacher, batch = teacher_of(model_of("mixtral"), "truth", said=said), batch_of()
    learn(teacher, batch)
    teacher.training.update_gates(is_kept=True, rate_factor=1.0)
    kept = {name: weight.clone() for name, weight in teacher.gates.weights.items()}
    learn(teacher, batch)
    next(iter(teacher.gates.weights.values())).grad[0, 0] = float("inf")
    teacher.training.update_gates(is_kept=True, rate_factor=1.0)
    assert teacher.gates.num_skipped == 1 and teacher.gates.num_mended == 0
    assert all(torch.equal(weight, kept[name]) for name, weight in teacher.gates.weights.items())
    assert any("skipped" in text for text in said)


def test_gates_that_never_become_finite_are_given_up() -> None:
    teacher, batch = teacher_of(model_of("mixtral"), "truth"), batch_of()
    for _ in range(25):
        if teacher.trains:
            learn(teacher, batch)
            next(iter(teacher.gates.weights.values())).grad[0, 0] = float("nan")
            teacher.training.update_gates(is_kept=True, rate_factor=1.0)
    assert teacher.is_frozen and teacher.gates.num_skipped == 20


def test_an_fp16_teacher_is_trained_through_a_loss_scale() -> None:
    teacher, batch = teacher_of(model_of("qwen3_moe").half(), "truth", load_balance_weight=0.1), batch_of()
    assert teacher.gates.loss_scale > 1
    assert all(weight.dtype == torch.float32 for weight in teacher.gates.weights.values())
    for _ in range(3):
        learn(teacher, batch)
        teacher.training.update_gates(is_kept=True, rate_factor=1.0)
    assert teacher.gates.optimizer.num_updates + teacher.gates.num_skipped == 3
    assert teacher.gates.optimizer.num_updates >= 1


def test_only_every_nth_step_is_due() -> None:
    teacher, batch = teacher_of(model_of("mixtral"), "truth", every=3), batch_of()
    for step in range(7):
        teacher.training.begin([batch], step)
        assert teacher.training.is_due == (step in (2, 5))


def test_truth_makes_the_teacher_better_on_what_it_sees_and_the_alarm_is_silent() -> None:
    teacher, batch = teacher_of(model_of("mixtral"), "truth", rate=3e-2), batch_of(4)
    start = teacher.training.start([batch]).nll
    for _ in range(15):
        learn(teacher, batch)
        teacher.training.update_gates(is_kept=True, rate_factor=1.0)
    found = teacher.assess([batch])
    assert found.nll < start and not teacher.training.watch(found) and teacher.trains


def test_the_probe_sees_a_gain_and_leaves_the_original() -> None:
    batch = batch_of(4)
    teacher = teacher_of(model_of("mixtral"), "truth", rate=3e-2, probe_threshold=0.001)
    found = probe_gates(teacher, ([batch] for _ in range(15)), [batch], 15)
    assert found["is_worthwhile"] and found["gain"] > 0.001 and teacher.trains
    assert teacher.assess([batch]).nll == pytest.approx(found["nll_before"], abs=1e-6)
    assert teacher.gates.optimizer.num_updates == 0
    strict = teacher_of(model_of("mixtral"), "truth", rate=1e-6, probe_threshold=0.5)
    assert not probe_gates(strict, ([batch] for _ in range(3)), [batch], 3)["is_worthwhile"] and not strict.trains


def test_state_goes_out_and_comes_back() -> None:
    batch = batch_of()
    one, two = (teacher_of(model_of("mixtral"), "truth") for _ in range(2))
    one.training.start([batch])
    for _ in range(3):
        learn(one, batch)
        one.training.update_gates(is_kept=True, rate_factor=1.0)
    two.training.load(
        {name: tensor.clone() for name, tensor in one.training.tensors().items()}, one.training.state_dict()
    )
    for teacher in (one, two):
        learn(teacher, batch)
        teacher.training.update_gates(is_kept=True, rate_factor=1.0)
    assert all(torch.equal(weight, two.gates.weights[name]) for name, weight in one.gates.weights.items())
    assert one.training.state_dict() == two.training.state_dict()


# -- maths -----------------------------------------------------------------------------------------------


@given(
    tokens=st.integers(1, 20), experts=st.integers(2, 9), seed=st.integers(0, 999), is_sigmoid=st.booleans(),
    spread=st.floats(0, 50),
)  # fmt: skip
def test_bounds_of_balance_and_entropy(tokens: int, experts: int, seed: int, is_sigmoid: bool, spread: float) -> None:
    logits = spread * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    log_probs = gate_log_probs(logits, is_sigmoid=is_sigmoid)
    everyone = torch.ones(tokens, dtype=torch.bool)
    balance, spread_out = load_balance(log_probs, logits.topk(1).indices, everyone), entropy(log_probs, everyone)
    assert 0 <= balance.mean <= experts + 1e-3
    assert -1e-4 <= spread_out.mean <= torch.log(torch.tensor(float(experts))) + 1e-4


def test_even_gates_have_balance_one_and_collapsed_ones_the_number_of_experts() -> None:
    everyone = torch.ones(8, dtype=torch.bool)
    even = torch.arange(8).remainder(4).unsqueeze(1)
    assert load_balance(gate_log_probs(torch.zeros(8, 4)), even, everyone).mean == pytest.approx(1.0)
    sure = torch.full((8, 4), -30.0)
    sure[:, 2] = 30.0
    chosen = torch.full((8, 1), 2)
    assert load_balance(gate_log_probs(sure), chosen, everyone).mean == pytest.approx(4.0)
    assert entropy(gate_log_probs(sure), everyone).mean == pytest.approx(0.0, abs=1e-6)


def test_padding_counts_in_neither() -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    is_token = torch.tensor([True, True, False, True, False, True])
    chosen = logits.topk(2).indices
    other = torch.where(is_token.unsqueeze(1), logits, 100 * logits)
    for term in (
        lambda x: load_balance(gate_log_probs(x), chosen, is_token),
        lambda x: entropy(gate_log_probs(x), is_token),
    ):
        assert torch.equal(term(logits).total, term(other).total) and term(logits).count == 4
