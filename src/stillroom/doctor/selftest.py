"""Check numerics on this machine: `stillroom selftest`.

Trials compute small random problems with the code that runs use, and compare: losses with float64 and finite
differences, row kernels with the plain kernel in float64, precision policies with AdamW in float64. Short runs show
that the guard refuses what is not finite and that a killed run resumes bit for bit. The test suite shows that the
formulas are right; these trials show that this machine, its compiler and its libraries compute them.

# N positions, V vocabulary, D width, K kept ids
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stillroom import builtin
from stillroom.config import Config, load_config
from stillroom.config.schema import PrecisionConfig, TrainConfig
from stillroom.core.errors import ConfigError, NoBetterStudent, StillroomError
from stillroom.core.files import reason_of
from stillroom.core.types import DenseSignal, HeadWeights, SampledSignal, StudentView, TopKSignal
from stillroom.doctor.resume import SIGKILL, differences, last_state, run_apart
from stillroom.losses import divergences
from stillroom.losses import divergences as adaptive
from stillroom.losses.divergences import Divergence, on_logits
from stillroom.losses.head.kernel import CompiledKernel, build, choose_kernel, knows
from stillroom.losses.head.loss import score_head
from stillroom.losses.head.rows import Logits, PlainKernel, RowKernel, RowPlan, RowRecord, TeacherRows
from stillroom.precision import AdamW, ParameterGroup, Precision, resolve
from stillroom.precision.policy import POLICIES
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume

GROUPS = ("divergences", "kernels", "precision", "guard", "survival")

Status = Literal["passed", "failed", "not run"]


# -- trials ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """The largest error of a trial, its bound, and what it is an error of."""

    error: float
    bound: float
    of: str = ""


@dataclass(frozen=True)
class Trial:
    group: str
    name: str
    measure: Callable[[], Measured]


@dataclass(frozen=True)
class Outcome:
    """How a trial ended. `why` names the part that failed, or the reason why it was not run."""

    group: str
    name: str
    status: Status
    error: float | None
    bound: float | None
    why: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Report:
    outcomes: tuple[Outcome, ...]
    seconds: float
    device: str

    @property
    def failed(self) -> tuple[Outcome, ...]:
        return tuple(one for one in self.outcomes if one.status == "failed")

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": not self.failed,
            "device": self.device,
            "seconds": self.seconds,
            "failed": [f"{one.group}: {one.name}" for one in self.failed],
            "trials": [one.to_dict() for one in self.outcomes],
        }


class NotHere(Exception):
    """Raised by a trial of something that this machine does not have."""


class Wrong(Exception):
    """Raised by a trial whose answer is wrong in a way that is not a distance. The message says what was found."""


EXACT = Measured(0.0, 0.0, "the bits")


def selftest(
    device: torch.device,
    *,
    only: tuple[str, ...] = (),
    on_trial: Callable[[Trial, int, int], None] = lambda _trial, _number, _all: None,
) -> Report:
    """Run the trials, of the groups in `only` where it names any; `on_trial` is called as each begins.

    Arithmetic is tried on the CPU and, where it is another, on the device; the runs are on the CPU.
    """
    began = time.monotonic()
    outcomes: list[Outcome] = []
    devices = [torch.device("cpu"), *([device] if device.type != "cpu" else [])]
    with tempfile.TemporaryDirectory(prefix="stillroom-selftest-") as name:
        folder = Path(name)
        _write_world(folder)
        trials = [
            *divergence_trials(),
            *(trial for one in devices for trial in kernel_trials(one)),
            *(trial for one in devices for trial in precision_trials(one)),
            *_guard_trials(folder),
            *_survival_trials(folder),
        ]
        trials = [trial for trial in trials if not only or trial.group in only]
        for number, trial in enumerate(trials, start=1):
            on_trial(trial, number, len(trials))
            outcomes += run_trials([trial])
    return Report(tuple(outcomes), time.monotonic() - began, str(device))


def run_trials(trials: Iterable[Trial]) -> Iterator[Outcome]:
    """Run each trial. One that ends in an error has failed, and the others are run all the same."""
    for trial in trials:
        began = time.monotonic()
        status, measured, why = _attempt(trial)
        error, bound = (measured.error, measured.bound) if measured else (None, None)
        yield Outcome(trial.group, trial.name, status, error, bound, why, time.monotonic() - began)


def _attempt(trial: Trial) -> tuple[Status, Measured | None, str]:
    try:
        measured = trial.measure()
    except NotHere as reason:
        return "not run", None, str(reason)
    except Wrong as finding:
        return "failed", None, str(finding)
    except Exception as error:  # noqa: BLE001 - whatever a broken kernel or library raises is a finding
        return "failed", None, f"{type(error).__name__}: {reason_of(error)}"
    if measured.error <= measured.bound:  # false for NaN
        return "passed", measured, ""
    return "failed", measured, f"{measured.of} is off by {measured.error:.3g}, and may be by {measured.bound:.3g}"


def worst(*parts: Measured) -> Measured:
    """Return the part that comes nearest to its bound or exceeds it most; one that is NaN before all."""
    return max(parts, key=lambda part: part.error / part.bound if part.error == part.error else float("inf"))


def away(value: Tensor, expected: Tensor) -> float:
    """Return the largest deviation over the largest entry; NaN where either is not finite."""
    value, expected = value.detach().double().cpu(), expected.detach().double().cpu()
    if value.shape != expected.shape:
        raise ValueError(f"shape {list(value.shape)} instead of {list(expected.shape)}")
    if not bool(value.isfinite().all() and expected.isfinite().all()):
        return float("nan")
    return float((value - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def _draw(seed: int, *shape: int, spread: float = 3.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(spread).to(dtype)


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().clone().to(dtype).requires_grad_()


# -- losses ----------------------------------------------------------------------------------------------------

_TEMPERATURE = 2.0
_FP32 = 3e-5  # of values and gradients, of sums over 97 tokens
_DIFFERENCE_STEP = 1e-5  # of a central difference in float64: its error is of the order 1e-10
# Settings that show a divergence at work; one that is not named here is taken with its defaults.
_SETTINGS: dict[str, list[dict[str, float]]] = {
    "jsd": [{"beta": 0.5}, {"beta": 0.05}, {"beta": 0.9}],
    "skew_forward_kl": [{"alpha": 0.1}],
    "skew_reverse_kl": [{"alpha": 0.1}, {"alpha": 0.95}],
    "alpha_beta": [{"alpha": 0.2, "beta": 0.7}],
    "taid": [{"interpolation": 0.4}],
}
# They hold fixed what depends on the student, so finite differences do not see their gradient.
_NOT_SMOOTH = (adaptive.Interpolated, adaptive.TokenWise, adaptive.HeadAndTail)


def divergence_trials() -> list[Trial]:
    made = [Trial("divergences", name, functools.partial(_divergence, member)) for name, member in _members()]
    return [*made, Trial("divergences", "kd and ce through the head", _head_loss)]


def _members() -> list[tuple[str, Divergence]]:
    """Return every divergence that can be had by name, with a name that says its settings."""
    found = []
    for name in divergences.names():
        for settings in _SETTINGS.get(name, [{}]):
            said = ", ".join(f"{key} {value:g}" for key, value in settings.items())
            found.append((f"{name} ({said})" if said else name, divergences.make(name, settings)))
    return found


def _divergence(member: Divergence) -> Measured:
    """Compare FP32 with float64, and the gradient of float64 with a central difference."""
    logits = _draw(0, 7, 97, dtype=torch.float32), _draw(1, 7, 97, dtype=torch.float32)
    found = []
    for dtype in (torch.float32, torch.float64):
        student, teacher = (_leaf(one, dtype) for one in logits)
        value = on_logits(member, student, teacher, _TEMPERATURE)
        found.append((value, *torch.autograd.grad(value.sum(), (student, teacher), allow_unused=True)))
    parts = [
        Measured(away(single, double), _FP32, name)
        for single, double, name in zip(
            *found, ("the value", "the student's gradient", "the teacher's gradient"), strict=True
        )
        if double is not None
    ]
    if not isinstance(member, _NOT_SMOOTH):
        point, teacher = logits[0].double(), logits[1].double()
        direction = _draw(11, *point.shape, spread=1.0)
        direction /= direction.norm()
        ahead, behind = (
            on_logits(member, point + step * direction, teacher, _TEMPERATURE).sum()
            for step in (_DIFFERENCE_STEP, -_DIFFERENCE_STEP)
        )
        expected = float(ahead - behind) / (2 * _DIFFERENCE_STEP)
        error = abs(float((found[1][1] * direction).sum()) - expected) / max(abs(expected), 1e-6)
        parts.append(Measured(error, 1e-6, "the gradient against finite differences"))
    return worst(*parts)


def _head_loss() -> Measured:
    """Compare the fused head in FP32 with T^2 KL(p || q) and cross-entropy as papers print them, in float64."""
    hidden, other = (_draw(seed, 9, 12, spread=1.0, dtype=torch.float32) for seed in (0, 1))
    weights = [_draw(seed, 97, 12, spread=1.0, dtype=torch.float32) for seed in (2, 3)]
    targets = torch.arange(9) * 5 % 97
    ours, exact = _leaf(hidden, torch.float32), _leaf(hidden, torch.float64)
    loss = score_head(
        StudentView(ours, HeadWeights(weights[0])), DenseSignal(other, HeadWeights(weights[1])), targets,
        kd_weight=0.7, ce_weight=0.3, divergence=divergences.make("forward_kl"), temperature=_TEMPERATURE,
    ).loss  # fmt: skip
    student, teacher = exact @ weights[0].double().T, other.double() @ weights[1].double().T
    p, q = (torch.softmax(logits / _TEMPERATURE, -1) for logits in (teacher, student))
    kd = _TEMPERATURE**2 * (p * (p.log() - q.log())).sum(-1)
    ce = -torch.log_softmax(student, -1).gather(-1, targets[:, None]).squeeze(-1)
    expected = (0.7 * kd + 0.3 * ce).sum()
    gradients = torch.autograd.grad(loss, ours)[0], torch.autograd.grad(expected, exact)[0]
    return worst(Measured(away(loss, expected), _FP32, "the loss"), Measured(away(*gradients), _FP32, "the gradient"))


# -- row kernels -----------------------------------------------------------------------------------------------

_ROWS, _KEPT = 6, 8
_KERNEL_BOUND = 3e-4  # of FP32 rows: small differences of large terms cost digits; a wrong formula is off by 1e-2
# (tokens, has a bias, scale, soft cap) of heads
_HEADS: tuple[tuple[int, bool, float, float | None], ...] = (
    (301, False, 1.0, None),
    (301, True, 0.5, 5.0),
    (4099, False, 1.0, None),
)


def kernel_trials(device: torch.device) -> Iterator[Trial]:
    """Try each kernel of the device with each divergence and each form of teacher."""
    where = "" if device.type == "cpu" else f" on {device}"
    for kind in ("plain", "compiled"):
        labels_alone = functools.partial(_kernel, kind, device, None, "none")
        yield Trial("kernels", f"{kind}{where}, labels alone", labels_alone)
        for name, member in _members():
            if kind == "compiled" and device.type == "cpu" and not knows(member):
                continue  # its rows go through the plain kernel
            for form in ("dense", "top-k", *(["sampled"] if name == "forward_kl" else [])):
                measure = functools.partial(_kernel, kind, device, member, form)
                yield Trial("kernels", f"{kind}{where}, {name}, {form}", measure)


def _kernel_of(kind: str, device: torch.device) -> RowKernel:
    """Return the kernel of that kind on a device. Raise where this machine has none, with the reason.

    Not by `choose_kernel` on a CPU: it leaves out a kernel that its small comparison sees to be wrong.
    """
    if kind == "plain":
        return PlainKernel()
    if device.type != "cpu":
        choice = choose_kernel("auto", device)
        if choice.name == "plain":
            raise NotHere(choice.reason)
        return choice.kernel
    built = build()
    if built.path is None:
        raise NotHere(f"{built.reason}; rows go through the plain kernel")
    return CompiledKernel(built.path)


def _kernel(kind: str, device: torch.device, member: Divergence | None, form: str) -> Measured:
    """Compare values and gradient of a kernel in FP32 with those of the plain kernel in float64."""
    kernel, parts = _kernel_of(kind, device), []
    for num_tokens, has_bias, scale, softcap in _HEADS:
        raw = _draw(0, _ROWS, num_tokens, dtype=torch.float32)
        bias = _draw(3, num_tokens, dtype=torch.float32) if has_bias else None
        for temperatures in (torch.ones(_ROWS), torch.tensor([1.0, 0.6, 1.0, 3.0, 2.0, 1.0])):
            plan = RowPlan(member, True, bool((temperatures == 1).all()), True, False)
            found = []
            for one, place, dtype in (
                (kernel, device, torch.float32),
                (PlainKernel(), torch.device("cpu"), torch.float64),
            ):
                rows = _rows(num_tokens, temperatures, place, dtype)
                scratch = raw.to(place, dtype, copy=True)
                own = Logits(scratch, None if bias is None else bias.to(place, dtype), scale, softcap)
                one.run(own, _teacher(form, num_tokens, temperatures, place, dtype), rows, plan)
                found.append((rows, scratch))
            (ours, gradient), (exact, expected) = found
            parts += [
                Measured(away(ours.kd, exact.kd), _KERNEL_BOUND, "the distillation term"),
                Measured(away(ours.ce, exact.ce), _KERNEL_BOUND, "the cross-entropy"),
                Measured(away(gradient, expected), _KERNEL_BOUND, "the gradient"),
                Measured(float(ours.is_bad.sum()), 0.5, "the number of sound rows that were called bad"),
            ]
    return worst(*parts)


def _rows(num_tokens: int, temperatures: Tensor, device: torch.device, dtype: torch.dtype) -> RowRecord:
    return RowRecord(
        targets=(torch.arange(_ROWS) * 7 % num_tokens).to(device),
        temperatures=temperatures.to(device, dtype),
        kd_weights=torch.linspace(0.1, 0.7, _ROWS).to(device, dtype),
        ce_weights=torch.linspace(0.6, 0.2, _ROWS).to(device, dtype),
        kd=torch.zeros(_ROWS, device=device, dtype=dtype),
        ce=torch.zeros(_ROWS, device=device, dtype=dtype),
        is_bad=torch.zeros(_ROWS, dtype=torch.bool, device=device),
    )


def _teacher(
    form: str, num_tokens: int, temperatures: Tensor, device: torch.device, dtype: torch.dtype
) -> TeacherRows | None:
    """Make a teacher's answer in one of its forms, of the same FP32 values in any dtype."""
    if form == "none":
        return None

    def moved(values: Tensor) -> Tensor:
        return values.float().to(device, dtype)

    logits = _draw(1, _ROWS, num_tokens, dtype=torch.float32)
    if form == "dense":
        return Logits(moved(logits))
    log_probs = torch.log_softmax(logits.double() / temperatures[:, None], -1)
    if form == "top-k":
        ids = log_probs.topk(_KEPT).indices
        rest = torch.logsumexp(log_probs.scatter(-1, ids, -math.inf), -1)
        return TopKSignal(ids.to(device), moved(log_probs.gather(-1, ids)), moved(rest))
    ids = torch.randint(num_tokens, (_ROWS, _KEPT), generator=torch.Generator().manual_seed(2))
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return SampledSignal(ids.to(device), moved(torch.softmax(_draw(2, _ROWS, _KEPT), -1)), moved(entropy))


# -- precision policies ----------------------------------------------------------------------------------------

_TRAIN = TrainConfig(weight_decay=0.1)
_SIZE = 48
# What rounding to a dtype costs a product and its gradient, with room for their sums.
_PRODUCTS = {"fp32": 1e-5, "bf16-mixed": 3e-2}
_HALF_PRODUCTS = 4e-3
# What is lost of the way that thirty updates go: FP32 sums, 22 bits, FP16 rounded stochastically.
_WAYS = {"fp32": 1e-4, "bf16-mixed": 1e-4, "fp16-mixed": 1e-4, "fp16-master": 1e-4, "fp16-split": 1e-3, "fp16-sr": 5e-2}
_MOMENTS = {"float32": 0.0, "bfloat16": 3e-2, "int8": 0.1}  # rounded to 8 bits of precision, to codes of 3
_SMALL_RATE, _SMALL_STEPS = 5e-6, 120  # updates below half of FP16's spacing at weights of 0.02
_SMALL_LOSS = 0.03  # of the mean way of 2,304 weights


def precision_trials(device: torch.device) -> Iterator[Trial]:
    where = "" if device.type == "cpu" else f" on {device}"
    for mode in POLICIES:
        yield Trial("precision", f"{mode}{where}: products", functools.partial(_products, mode, device))
        for moments in ("float32", "bfloat16", "int8"):
            measure = functools.partial(_updates, mode, moments, device)
            yield Trial("precision", f"{mode}{where}: updates, {moments} moments", measure)
        small = functools.partial(_small_updates, mode, device)
        yield Trial("precision", f"{mode}{where}: updates at 5e-6", small)


def _policy(mode: str, device: torch.device, moments: str = "float32") -> Precision:
    try:
        return resolve(mode, device, config=PrecisionConfig.model_validate({"moments": moments}))
    except ConfigError as error:
        raise NotHere(error.what) from None


def _products(mode: str, device: torch.device) -> Measured:
    """Compare a product and its gradient, the loss scaled; also of a tiny loss, which FP16 cannot hold unscaled."""
    precision = _policy(mode, device)
    parts = []
    for size in (1e-3, 1e-8):
        weight = nn.Parameter(_draw(0, _SIZE, _SIZE, spread=0.2, dtype=torch.float32).to(device))
        precision.optimizer([ParameterGroup("student", 1e-3, (("matrix", weight),))], _TRAIN)  # stores it as it does
        x = _draw(1, 16, _SIZE, spread=1.0, dtype=torch.float32).to(device)
        upstream = _draw(2, 16, _SIZE, spread=size).float().to(device)
        with precision.autocast():
            y = (x.to(weight.dtype) @ weight.T).float()
        precision.backward((y * upstream).sum())
        assert weight.grad is not None
        exact = weight.detach().double().cpu()
        bound = _PRODUCTS.get(mode, _HALF_PRODUCTS)
        expected = upstream.double().cpu().T @ x.double().cpu()
        own = weight.grad.double() / precision.loss_scale
        parts.append(Measured(away(y, x.double().cpu() @ exact.T), bound, "a product"))
        parts.append(Measured(away(own, expected), bound, f"the gradient of a loss of size {size:g}"))
    return worst(*parts)


def _updates(mode: str, moments: str, device: torch.device) -> Measured:
    precision = _policy(mode, device, moments)
    weight = _draw(0, _SIZE, _SIZE, spread=0.02).half().double()  # every storage can hold it
    gradients = [_draw(10 + step, _SIZE, _SIZE, spread=1.0).half().float() for step in range(30)]
    own, expected = _trained(precision, weight, gradients, 1e-3), _adamw(weight, gradients, 1e-3)
    bound = max(_MOMENTS[moments], _WAYS[mode])
    return Measured(away(own - weight, expected - weight), bound, "the way the weights went")


def _small_updates(mode: str, device: torch.device) -> Measured:
    """Show that updates which rounding to nearest would lose one by one arrive in the mean."""
    precision = _policy(mode, device)
    weight = _draw(0, _SIZE, _SIZE, spread=0.02).half().double()
    gradients = [_draw(1, _SIZE, _SIZE, spread=1.0).sign().float()] * _SMALL_STEPS
    own = _trained(precision, weight, gradients, _SMALL_RATE) - weight
    expected = _adamw(weight, gradients, _SMALL_RATE) - weight
    arrived = float((own * expected).sum() / expected.pow(2).sum())
    return Measured(abs(arrived - 1.0), _SMALL_LOSS, "the share of small updates that arrived")


def _trained(precision: Precision, weight: Tensor, gradients: list[Tensor], rate: float) -> Tensor:
    """Return a matrix after an update for each gradient, as the policy stores it."""
    parameter = nn.Parameter(weight.float().to(precision.device))
    group = ParameterGroup("student", rate, (("matrix", parameter),))
    optimizer: AdamW = precision.optimizer([group], _TRAIN)
    for gradient in gradients:
        parameter.grad = gradient.to(precision.device, parameter.dtype)
        optimizer.step(1.0, {"student": 1.0})
    return optimizer.cells["student"][0].storage.read().double().cpu()


def _adamw(weight: Tensor, gradients: list[Tensor], rate: float) -> Tensor:
    """Update a weight once for each gradient (Loshchilov and Hutter 2019), in float64."""
    beta1, beta2 = _TRAIN.beta1, _TRAIN.beta2
    weight = weight.clone()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for number, gradient in enumerate(gradients, start=1):
        weight *= 1 - rate * _TRAIN.weight_decay
        first = beta1 * first + (1 - beta1) * gradient.double()
        second = beta2 * second + (1 - beta2) * gradient.double() ** 2
        mean, square = first / (1 - beta1**number), second / (1 - beta2**number)
        weight -= rate * mean / (square.sqrt() + _TRAIN.epsilon)
    return weight


# -- runs ------------------------------------------------------------------------------------------------------

_SAYING = (
    "the still room keeps spirits and waters, and the maid who keeps the room knows how long a thing must be "
    "heated, how slowly it must drip, and what is left behind when the best of it has gone over the bridge"
)
_FAULTY_STEPS = 18

Events = list[dict[str, Any]]


def _write_world(folder: Path) -> None:
    """Write the configuration of a student of a few thousand weights and a training text into a folder."""
    student = folder / "student"
    student.mkdir(parents=True, exist_ok=True)
    large = json.loads((builtin.model_path("student") / "config.json").read_text(encoding="utf-8"))
    small = {**large, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    (student / "config.json").write_text(json.dumps({**small, "num_key_value_heads": 2}), encoding="utf-8")
    rng, words = random.Random(0), _SAYING.split()
    lines = []
    for _ in range(120):
        start, length = rng.randrange(len(words)), rng.randrange(8, 24)
        lines.append(json.dumps({"text": " ".join(words[(start + i) % len(words)] for i in range(length)) + "."}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _world_config(folder: Path, **over: Any) -> Config:
    """Configure a run of a second or two in that folder; `over` with __ for the dots of keys."""
    base: dict[str, Any] = {
        "teacher.model": "builtin:teacher",
        "student.model": str(folder / "student"),
        "student.init": "random",
        "data.train": str(folder / "train.jsonl"),
        "data.max_length": 24,
        "data.eval_share": 0.1,
        "objectives.kd.weight": 0.7,
        "objectives.ce.weight": 0.3,
        "train.batch_size": 2,
        "train.learning_rate": 3e-3,
        "train.compile": "off",
        "guard.snapshot_steps": 4,
        "eval.max_batches": 1,
        "eval.samples": 0,
    }
    return load_config(overrides={**base, **{key.replace("__", "."): value for key, value in over.items()}})


def _guard_trials(folder: Path) -> list[Trial]:
    """Judge the records of three short runs with injected faults: one of the state, one of FP16's scale, one strict."""
    faults = "nan_weight@6,inf_logit@9,nan_moment@11,all_masked@13,teacher_nan@15x3"
    over = {"train__max_steps": _FAULTY_STEPS, "guard__fallback_after": 3, "guard__fallback_steps": 2}
    main = _run(folder, "faults", faults, **over)
    half = _run(folder, "overflow", "inf_grad@3", precision__mode="fp16-mixed", train__max_steps=5)
    strict = _run(folder, "strict", "nan_grad@3", train__max_steps=5, guard__on_nonfinite="halt")
    checks: dict[str, Callable[[], Measured]] = {
        "NaN in a weight: back to a good state": lambda: _judged(main(), (6,), "rollback"),
        "logits that are not finite: the batch is left out": lambda: _judged(main(), (9,), "skip"),
        # A broken moment reaches the weights with the update, and is found in the next step.
        "NaN in a moment: back to a good state": lambda: _judged(main(), (11, 12), "rollback"),
        "no scored token: the batch is left out": lambda: _judged(main(), (13,), "skip"),
        "a teacher that answers NaN: labels for a while": lambda: _judged(main(), (17,), "fallback"),
        "the student of that run is finite": lambda: _finite(main(), folder / "faults"),
        "an overflow in FP16: again at a smaller scale": lambda: _judged(half(), (3,), "retry"),
        "on_nonfinite = halt: the run stops": lambda: _stopped(strict()),
    }
    return [Trial("guard", name, check) for name, check in checks.items()]


def _run(folder: Path, name: str, faults: str, **over: Any) -> Callable[[], Events]:
    """Return the events of a run, which takes place when they are first asked for."""

    @functools.cache
    def events() -> Events:
        config = _world_config(folder, train__eval_steps=100, guard__max_skip_share=1.0, **over)
        try:
            distill(config, folder / name, device="cpu", inject=faults)
        except NoBetterStudent:
            pass  # so few steps need not teach anything
        except StillroomError as error:
            if error.exit_code != 22:
                raise
        return read_events(folder / name / "events.jsonl")

    return events


def _judged(events: Events, steps: tuple[int, ...], verdict: str) -> Measured:
    """Raise unless one of the attempts at these steps was judged so."""
    seen = [event["verdict"] for event in events if event["event"] == "step" and event["step"] in steps]
    if verdict not in seen:
        raise Wrong(f"step {steps[0]} was judged {', '.join(seen) or 'not at all'}, and not {verdict}")
    return EXACT


def _finite(_events: Events, folder: Path) -> Measured:
    saved = last_state(folder)
    if saved.step != _FAULTY_STEPS:
        raise Wrong(f"the last checkpoint is that of step {saved.step}: later states were not fit to be saved")
    for name, tensor in saved.tensors["student"].items():
        if not bool(tensor.isfinite().all()):
            raise Wrong(f"{name} is not finite")
    return EXACT


def _stopped(events: Events) -> Measured:
    codes = [event.get("exit_code") for event in events if event["event"] == "run_end"]
    if codes != [22]:
        raise Wrong(f"the run ended with exit code {codes}, and not with 22")
    return EXACT


def _survival_trials(folder: Path) -> list[Trial]:
    return [Trial("survival", "killed and resumed: the same bits", functools.partial(_resumes, folder))]


def _resumes(folder: Path) -> Measured:
    """Kill a process before its fourth step, resume it in this one, and compare with a run without a break."""
    over = {"train__gradient_accumulation_steps": 2, "train__save_steps": 2, "train__eval_steps": 5}
    config = _world_config(folder, precision__mode="fp16-split", train__max_steps=5, **over)
    settings = folder / "killed.json"
    settings.write_text(json.dumps(config.to_dict()), encoding="utf-8")
    killed = run_apart(["distill", str(settings), "--out", str(folder / "killed"), "--inject", "kill@4"], "cpu")
    if killed.returncode != SIGKILL:
        raise Wrong(f"the process was to be killed and ended with {killed.returncode}: {killed.stderr[-200:]}")
    with contextlib.suppress(NoBetterStudent):  # so few steps need not teach anything
        distill(config, folder / "uncut", device="cpu")
    with contextlib.suppress(NoBetterStudent):
        resume(folder / "killed", device="cpu")
    for first in differences(folder / "uncut", folder / "killed"):
        raise Wrong(f"{first.name}: {first.what}")
    return EXACT
