"""Precision policies: what they keep, what they promise, and that the famous error cannot be reached."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn

from stillroom.config.schema import PrecisionConfig, TrainConfig
from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.precision import AdamW, LossScale, ParameterGroup, choose, resolve, storage
from stillroom.precision.device import DeviceFacts
from stillroom.precision.policy import POLICIES
from stillroom.training.preflight import fitting_scale
from stillroom.training.run import longest_step

HALF_MODES = ["fp16-master", "fp16-split", "fp16-sr"]


def parameters(seed: int = 0) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("matrix", nn.Parameter(0.02 * torch.randn(64, 64, generator=generator))),
        ("gain", nn.Parameter(torch.ones(64))),
    ]


def train(mode: str, rate: float, steps: int = 100, moments: str = "float32") -> dict[str, torch.Tensor]:
    """A small regression in a given precision: what moves, and how far."""
    named = parameters()
    precision = resolve(mode, config=PrecisionConfig(moments=moments))  # type: ignore[arg-type]
    group = ParameterGroup("student", rate, tuple(named))
    optimizer = precision.optimizer([group], TrainConfig(weight_decay=0.0))
    generator = torch.Generator().manual_seed(1)
    target = 0.02 * torch.randn(64, 64, generator=generator)
    for _ in range(steps):
        x = torch.randn(16, 64, generator=generator)
        weight, gain = (p for _, p in named)
        with precision.half_products():
            y = (x.to(weight.dtype) @ weight.T * gain).float()
        loss = (y - x @ target.T).square().mean()
        precision.backward(loss)
        precision.step(optimizer, 1.0, {"student": 1.0})
        optimizer.zero_grad()
    return {
        name: cell.storage.read() for name, cell in zip(("matrix", "gain"), optimizer.cells["student"], strict=True)
    }


@pytest.mark.parametrize("mode", HALF_MODES)
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("rate", [2e-3, 5e-6])
def test_half_weights_move_as_far_as_full_ones(mode: str, moments: str, rate: float) -> None:
    start = {name: p.data.clone() for name, p in parameters()}
    exact, half = train("fp32", rate), train(mode, rate, moments=moments)
    for name in start:
        true, got = exact[name] - start[name], half[name] - start[name]
        # Along the true direction: stochastic rounding adds noise across it, which averages out over weights.
        progress = float((true * got).sum() / (true * true).sum())
        assert progress == pytest.approx(1.0, abs=0.05)


def test_plain_half_weights_do_not_move_at_a_small_rate() -> None:
    """Why masters, residuals or stochastic rounding are needed at all."""
    exact = train("fp32", 5e-6)["matrix"]
    start = parameters()[0][1].data.half()
    assert (start.float() == start.float().add(exact - parameters()[0][1].data).half().float()).float().mean() < 1.0
    stuck = start.clone()
    for _ in range(100):
        stuck = (stuck.float() + 5e-6 * 0.1).half()
    assert (stuck == start).float().mean() > 0.5


@pytest.mark.parametrize("mode", HALF_MODES)
def test_gains_have_fp32_masters_in_every_half_mode(mode: str) -> None:
    moved = train(mode, 5e-6, steps=50)["gain"]
    assert moved.dtype == torch.float32 and (moved != 1.0).float().mean() > 0.95


def test_unscaling_half_gradients_fails_in_plain_torch_and_cannot_be_reached_here() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    for mode in POLICIES:
        train(mode, 1e-3, steps=2)


@given(st.floats(-60000, 60000, width=32))
@settings(max_examples=200)
def test_split_and_join_keep_twenty_bits(value: float) -> None:
    tensor = torch.tensor([value], dtype=torch.float32)
    joined = storage.join(*storage.split(tensor))
    assert torch.allclose(joined, tensor, rtol=2**-20, atol=2**-36)


@given(st.floats(-6e4, 6e4, width=32))
@settings(max_examples=50)
def test_stochastic_rounding_gives_a_neighbour_and_the_right_mean(value: float) -> None:
    tensor = torch.full((4096,), value, dtype=torch.float32)
    rounded = storage.stochastic_fp16(tensor, torch.Generator().manual_seed(0)).float()
    spacing = max(abs(value) * 2**-10, 2**-24)
    assert (rounded - value).abs().max() <= spacing * 1.001
    assert abs(float(rounded.mean()) - value) <= spacing * 0.05


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rounding_hides_nothing(value: float) -> None:
    tensor = torch.tensor([value])
    for round_ in (storage.stochastic_fp16, storage.stochastic_bf16):
        assert not torch.isfinite(round_(tensor, torch.Generator().manual_seed(0))).any()


def test_bf16_moments_decay() -> None:
    """To nearest, 0.999 times a BF16 number is the same number for ever."""
    values, generator = torch.ones(1000, dtype=torch.bfloat16), torch.Generator().manual_seed(0)
    for _ in range(1000):
        values = storage.stochastic_bf16(values.float() * 0.999, generator)
    assert float(values.float().mean()) == pytest.approx(0.999**1000, rel=0.05)


# -- how far an update goes ------------------------------------------------------------------------------


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.5, 0.9), (0.8, 0.7)])
@pytest.mark.parametrize("quiet", [0, 3, 400])
def test_no_gradients_move_a_weight_further_than_its_longest_step(betas: tuple[float, float], quiet: int) -> None:
    """Against torch's own AdamW, with gradients made to move a weight as far as they can: silence, then a burst."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=1.0, betas=betas, weight_decay=0.0, eps=1e-30)
    bound = longest_step(*betas)
    moved = []
    for index in range(quiet + 40):
        growth = (betas[0] / betas[1]) ** -(index - quiet) if betas[1] < 0.99 else 1.0
        weight.grad = torch.full_like(weight, growth if index >= quiet else 0.0)
        before = weight.detach().clone()
        optimizer.step()
        moved.append(float((weight.detach() - before).abs()))
    assert max(moved) <= bound * (1 + 1e-9) and bound < 10


def test_betas_that_bound_nothing_are_known() -> None:
    assert longest_step(0.9, 0.8) == float("inf") and longest_step(0.9, 0.0) == float("inf")
    assert longest_step(0.9, 0.95) == pytest.approx(1.17, abs=0.02)
    assert longest_step(0.9, 0.999) == pytest.approx(7.27, abs=0.02)


# -- one count for each parameter ------------------------------------------------------------------------


def late_steps(optimizer: object, early: nn.Parameter, late: nn.Parameter, step: object, num: int = 120) -> None:
    """The second parameter has its first gradient after a hundred updates of the first."""
    generator = torch.Generator().manual_seed(3)
    for index in range(num):
        early.grad = torch.randn(early.shape, generator=generator)
        late.grad = torch.randn(late.shape, generator=generator) if index >= 100 else None
        step()  # type: ignore[operator]


def test_a_parameter_first_used_late_takes_the_steps_that_torch_gives_it() -> None:
    ours = [nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    train = TrainConfig(weight_decay=0.01)
    group = ParameterGroup("student", 1e-2, (("early", ours[0]), ("late", ours[1])))
    optimizer = resolve("fp32").optimizer([group], train)
    reference = torch.optim.AdamW(theirs, lr=1e-2, betas=(train.beta1, train.beta2), weight_decay=0.01)
    late_steps(optimizer, *ours, lambda: optimizer.step(1.0, {"student": 1.0}))
    late_steps(reference, *theirs, reference.step)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-5, atol=1e-7)


def test_counts_return_with_a_checkpoint_and_an_older_one_has_one_for_all() -> None:
    def made() -> AdamW:
        named = (("early", nn.Parameter(torch.ones(4, 4))), ("late", nn.Parameter(torch.ones(4, 4))))
        return resolve("fp32").optimizer([ParameterGroup("student", 1e-2, named)], TrainConfig())

    first = made()
    early, late = (cell.parameter for cell in first.cells["student"])
    late_steps(first, early, late, lambda: first.step(1.0, {"student": 1.0}), num=103)
    saved = {name: tensor.clone() for name, tensor in first.tensors().items()}
    assert saved["num_updates"].tolist() == [103, 3]
    again, older = made(), made()
    again.num_updates = older.num_updates = first.num_updates
    again.load_tensors(saved)
    older.load_tensors({name: tensor for name, tensor in saved.items() if name != "num_updates"})
    assert [int(cell.num_updates) for cell in again.cells["student"]] == [103, 3]
    assert [int(cell.num_updates) for cell in older.cells["student"]] == [103, 103]
    with pytest.raises(ValueError, match="other parameters"):
        again.load_tensors({**saved, "third.first": saved["early.first"]})


# -- the loss scale --------------------------------------------------------------------------------------


def test_the_scale_follows_a_hand_written_table() -> None:
    scale = LossScale(scale=16.0, growth_steps=3, floor=2.0)
    seen = []
    for overflowed in [False, False, False, True, True, True, True, False, False, False]:
        scale = scale.after_overflow() if overflowed else scale.after_good_step()
        seen.append(scale.scale)
    assert seen == [16, 16, 32, 16, 8, 4, 2, 2, 2, 4]
    assert LossScale(scale=2.0, floor=2.0).is_at_floor


@pytest.mark.parametrize(
    ("peak", "configured", "floor", "found"),
    [
        (0.0, 65536.0, 1.0, 65536.0),
        (0.1, 65536.0, 1.0, 65536.0),
        (8.0, 65536.0, 1.0, 512.0),
        (1e9, 65536.0, 4.0, 4.0),
        (float("inf"), 65536.0, 1.0, 1.0),
        (float("nan"), 65536.0, 1.0, 1.0),
        (8.0, 3000.0, 1000.0, 1000.0),
    ],
)
def test_a_scale_fits_the_gradients_with_room_to_grow(
    peak: float, configured: float, floor: float, found: float
) -> None:
    assert fitting_scale(peak, configured, floor) == found


# -- the choice ------------------------------------------------------------------------------------------

T4 = DeviceFacts("cuda", "Tesla T4", False, 16 * 10**9, "sm_75", ("sm_70", "sm_75"))
A100 = DeviceFacts("cuda", "A100", True, 40 * 10**9, "sm_80", ("sm_80",))
CPU = DeviceFacts("cpu")


@pytest.mark.parametrize(
    ("facts", "parameters_", "mode"),
    [
        (CPU, 10**6, "fp32"),
        (A100, 10**9, "bf16-mixed"),
        (T4, 4 * 10**8, "fp16-master"),
        (T4, 7 * 10**8, "fp16-split"),
    ],
)
def test_auto_chooses_by_what_the_device_can_do(facts: DeviceFacts, parameters_: int, mode: str) -> None:
    chosen, reason = choose("auto", facts, parameters_)
    assert chosen == mode and reason


def test_bf16_is_refused_where_it_would_be_emulated() -> None:
    with refused(ConfigError, "precision.mode"):
        choose("bf16-mixed", T4)


@pytest.mark.parametrize(
    ("architecture", "built_for", "supported"),
    [
        ("sm_60", ("sm_70", "sm_75", "sm_80"), False),
        ("sm_60", ("sm_50", "sm_60", "sm_70"), True),
        ("sm_75", ("sm_70", "sm_75"), True),
        ("sm_89", ("sm_80", "sm_86", "sm_90"), True),
        ("sm_120", ("sm_80", "compute_90"), True),
        ("sm_60", ("compute_70",), False),
    ],
)
def test_a_card_without_kernels_is_seen_before_it_is_used(
    architecture: str, built_for: tuple[str, ...], supported: bool
) -> None:
    assert DeviceFacts("cuda", "card", architecture=architecture, built_for=built_for).is_supported is supported


def test_fp16_on_a_cpu_must_be_asked_for_and_says_how_it_computes() -> None:
    assert "computed in FP32 and rounded" in resolve("fp16-split").reason


@pytest.mark.parametrize("device", ["nosuch", "cuda:7", "\x1b[31m"])
def test_a_device_that_is_not_there_is_refused_by_name(device: str) -> None:
    with pytest.raises(BrokenAtStart):
        resolve("fp32", device)


def test_a_mode_that_does_not_exist_is_refused_wherever_it_is_asked_for() -> None:
    facts = DeviceFacts("cpu")
    for ask in (lambda: choose("fp8", facts), lambda: resolve("fp8")):
        with pytest.raises(ConfigError):
            ask()
    with refused(ConfigError, "num_parameters"):
        choose("auto", facts, -1)


@pytest.mark.parametrize("mode", list(POLICIES))
def test_what_is_not_trained_is_stored_as_it_is_multiplied(mode: str) -> None:
    policy = resolve(mode)
    own = {"fp32": torch.float32, "bf16-mixed": torch.bfloat16}.get(mode, torch.float16)
    assert policy.frozen_storage() == own
    for asked in ("float32", "float16", "bfloat16"):
        dtype = getattr(torch, asked)
        if dtype == own or not policy.keeps_half_weights:
            assert policy.frozen_storage(asked) == dtype
        else:
            with refused(ConfigError, "student.adapter.base_dtype", mode, asked):
                policy.frozen_storage(asked)


@pytest.mark.parametrize("mode", list(POLICIES))
def test_a_group_kept_in_fp32_is_its_own_master_in_every_mode(mode: str) -> None:
    matrix = nn.Parameter(torch.full((4, 4), 0.3))
    group = ParameterGroup("student", 1e-6, (("matrix", matrix),), in_fp32=True)
    optimizer = resolve(mode).optimizer([group], TrainConfig(weight_decay=0.0, gradient_accumulation_steps=2))
    matrix.grad = torch.ones_like(matrix)
    optimizer.step(1.0, {"student": 1.0})
    assert matrix.dtype == torch.float32 and torch.allclose(matrix, torch.full((4, 4), 0.3 - 1e-6), rtol=0, atol=3e-8)
    assert not [name for name in optimizer.tensors() if name.endswith(("master", "residual"))]
