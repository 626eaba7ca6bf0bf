"""What `stillroom bench` measures, part by part. Each part runs in its own process (`bench/run.py`).

A part returns figures by name. Times are taken by a `Clock`; a test gives one that answers with the model's seconds, so
that everything but the numbers is tested without a GPU.

# N positions, C positions of a chunk, V vocabulary, D width
"""

from __future__ import annotations

import platform
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from stillroom.config import load_config
from stillroom.core.errors import StillroomError
from stillroom.core.machine import main_memory, nvidia_driver
from stillroom.doctor.selftest import selftest
from stillroom.losses.head.kernel import choose_kernel
from stillroom.losses.head.loss import DenseTeacher, fused_head_loss
from stillroom.losses.head.products import multiplies_half
from stillroom.models.random import LlamaShape, write_llama
from stillroom.precision.device import facts_of
from stillroom.precision.gpus import LAUNCH_SECONDS, Kernels, Rates
from stillroom.telemetry import EventLog, read_events
from stillroom.training.build import build_run
from stillroom.training.distill import distill
from stillroom.training.models import load_models
from stillroom.training.run import RunState
from stillroom.training.run_folder import versions
from stillroom.training.step import train_step

PHASES = ("teacher", "student forward", "head", "student backward", "optimizer")
_REPEATS, _WARM_UPS = 5, 2
_LEAST_SECONDS = 0.3


@dataclass(frozen=True)
class Size:
    """The models and the batch of a step. Those of a GPU are what `predictions.json` is about."""

    teacher: LlamaShape
    student: LlamaShape
    rows: int
    length: int
    chunk: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


ON_GPU = Size(  # SmolLM2-135M, and every other layer of it
    LlamaShape(30, 576, 1536, 9, 3, 49_152), LlamaShape(15, 576, 1536, 9, 3, 49_152), rows=4, length=512, chunk=1024
)
ON_CPU = Size(LlamaShape(4, 128, 344, 4, 2, 8_192), LlamaShape(2, 128, 344, 4, 2, 8_192), rows=4, length=128, chunk=256)


def size_for(device: torch.device) -> Size:
    return ON_GPU if device.type == "cuda" else ON_CPU


# -- time -------------------------------------------------------------------------------------------------


class Clock:
    """Seconds of a piece of work on a device."""

    def __init__(self, device: torch.device, keep: Callable[[dict[str, Any]], None] = lambda _found: None) -> None:
        """`keep` is given what a part has found so far: it may not come to its end."""
        self.device, self.keep = device, keep

    def time(self, name: str, work: Callable[[], object], kernels: Sequence[Kernels] = ()) -> float:
        """Seconds of one of several calls after two that warm up. `kernels` is what the work asks of the device.

        The median on a GPU, whose clocks fall under load; the least on a CPU, where other programs can only add.
        """
        for _ in range(_WARM_UPS):
            work()
        taken: list[float] = []
        while len(taken) < _REPEATS or sum(taken) < _LEAST_SECONDS:
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - began)
        return median(taken) if self.device.type == "cuda" else min(taken)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def now(self) -> Any:
        """A mark on the device's own time line: the host runs ahead of it."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, name: str, begin: Any, end: Any) -> float:
        """Seconds between two marks; waits for the second."""
        if self.device.type != "cuda":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


# -- 1: facts ------------------------------------------------------------------------------------------------


def facts(device: torch.device, clock: Clock) -> dict[str, Any]:
    """The machine, and whether its numerics are right."""
    known = facts_of(device)
    memory = main_memory()
    report = selftest(device, only=("kernels", "precision"))
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions(),
        "cuda_of_torch": torch.version.cuda,
        "driver": nvidia_driver(),
        "device": known.name if known.kind == "cuda" else platform.processor() or platform.machine(),
        "kind": known.kind,
        "architecture": known.architecture,
        "device_bytes": known.memory_bytes,
        "main_memory_bytes": memory.total,
        "threads": torch.get_num_threads(),
        "native_bf16": known.has_native_bf16,
        "kernel": choose_kernel("auto", device).name,
        "kernel_reason": choose_kernel("auto", device).reason,
        "selftest_failed": [f"{one.group}: {one.name}: {one.why}" for one in report.failed],
        "selftest_trials": len(report.outcomes),
        **gpu_state("now"),
    }


_ASKED = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")


def gpu_state(when: str) -> dict[str, Any]:
    """Clocks, watts and heat as nvidia-smi tells them; nothing where it is not there."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        values = done.stdout.strip().splitlines()[0].split(",")
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return {f"nvidia_smi_{when}": "no answer"}
    return {f"nvidia_smi_{when}": dict(zip(_ASKED, (value.strip() for value in values), strict=False))}


# -- 2: constants of the device ------------------------------------------------------------------------------


def constants(device: torch.device, clock: Clock) -> dict[str, Any]:
    """Product rates at the shapes of the head, bandwidth, and what a launch costs."""
    before, size = gpu_state("before"), size_for(device)
    products = {}
    for dtype, name in ((_half(device), "half"), (torch.float32, "fp32")):
        if dtype is not None:
            products[name] = _product_rates(clock, device, dtype, name, size)
    bandwidth = _bandwidth(clock, device)
    host = _launches(clock, device)
    fp32 = products["fp32"]["rate"]
    found = {
        "products": products,
        "bandwidth": bandwidth,
        "rates": {
            "half": products["half"]["rate"] if "half" in products else fp32,
            "fp32": fp32,
            "bandwidth": bandwidth,
            "launch": min(host, LAUNCH_SECONDS),  # of a kernel that does nothing: assumed, it hides behind the host
            "host": host,
        },
    }
    if device.type == "cuda":
        found |= _copies(clock, device)
    return {**found, **before, **gpu_state("after")}


def _half(device: torch.device) -> torch.dtype | None:
    """The dtype of the head's operands; None on a CPU, which multiplies in FP32."""
    if not multiplies_half(device):
        return None
    return torch.bfloat16 if facts_of(device).has_native_bf16 else torch.float16


def _product_rates(clock: Clock, device: torch.device, dtype: torch.dtype, name: str, size: Size) -> dict[str, Any]:
    """FLOP/s of the four products of a head, and their mean weighted by work."""
    chunk, vocabulary = size.chunk, size.student.vocabulary
    spent, flops, rates = 0.0, 0.0, {}
    hidden = torch.randn(chunk, size.student.width, device=device).to(dtype)
    weight = torch.randn(vocabulary, size.student.width, device=device).to(dtype)
    rows = torch.randn(chunk, vocabulary, device=device).to(dtype)
    for said, left, right in (
        ("logits", hidden, weight.t()),
        ("to hidden", rows, weight),
        ("to weight", rows.t(), hidden),
    ):
        count = 2.0 * left.shape[0] * left.shape[1] * right.shape[1]
        kernel = Kernels(1, count, "half" if name == "half" else "fp32", 0.0)
        seconds = clock.time(f"product {name} {said}", lambda left=left, right=right: _multiply(left, right), [kernel])  # type: ignore[misc]
        rates[said] = count / seconds
        times = 2 if said == "logits" else 1  # of student and teacher
        spent, flops = spent + times * seconds, flops + times * count
    return {"rate": flops / spent, **rates}


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    if left.dtype == torch.float32 or left.device.type == "cpu":
        return torch.mm(left, right)
    try:
        return torch.mm(left, right, out_dtype=torch.float32)
    except (TypeError, RuntimeError):  # a torch before 2.8
        return torch.mm(left, right)


def _bandwidth(clock: Clock, device: torch.device) -> float:
    """Bytes a second, read and written, of a copy that no cache holds."""
    count = (1 << 28 if device.type == "cuda" else 1 << 25) // 4
    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    moved = 8.0 * count
    return moved / clock.time("copy", lambda: target.copy_(source), [Kernels(1, 0.0, "half", moved)])


def _launches(clock: Clock, device: torch.device) -> float:
    """Seconds of the host to issue an operation, from Python to the queue of the device; small kernels hide in it."""
    small, many = torch.zeros(1, device=device), 1000

    def issue() -> None:
        for _ in range(many):
            small.add_(1.0)

    return clock.time("launches", issue, [Kernels(many, 0.0, "half", 0.0)]) / many


def _copies(clock: Clock, device: torch.device) -> dict[str, Any]:
    """Bytes a second from main memory, pinned and not."""
    count = 1 << 26
    found: dict[str, Any] = {}
    for name in ("pinned", "pageable"):
        home = torch.zeros(count, dtype=torch.uint8)
        try:
            home = home.pin_memory() if name == "pinned" else home
        except RuntimeError as error:
            found["pinned_refused"] = str(error).partition("\n")[0]
            continue
        seconds = clock.time(f"{name} copy", lambda home=home: home.to(device, non_blocking=True))  # type: ignore[misc]
        found[f"{name}_copy_bytes_per_second"] = count / seconds
    return found


# -- 3: the head by every kernel -----------------------------------------------------------------------------

_LOSS_APART, _GRADIENT_APART = 1e-3, 1e-2  # relative; gradients pass through half operands on a GPU


def kernels(device: torch.device, clock: Clock) -> dict[str, Any]:
    """Loss and gradients of a whole head with each row kernel, timed and compared with the plain one."""
    size, half = size_for(device), _half(device)
    generator = torch.Generator().manual_seed(0)
    shape = size.student.vocabulary, size.student.width

    def drawn(*sizes: int, scale: float) -> Tensor:
        return (scale * torch.randn(*sizes, generator=generator)).to(device, half or torch.float32)

    hidden, other = (drawn(size.tokens, size.student.width, scale=1.0) for _ in range(2))
    weight, teacher_weight = (drawn(*shape, scale=0.05) for _ in range(2))
    labels = torch.randint(shape[0], (size.tokens,), generator=generator).to(device)
    rows: list[dict[str, Any]] = []
    for divergence in ("forward_kl", "jsd"):
        exact: tuple[float, Tensor] | None = None  # loss and gradient of the plain kernel
        for asked in ("plain", "auto"):
            name = choose_kernel(asked, device).name
            if asked == "auto" and name == "plain":
                continue
            learned = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]

            def work(asked: str = asked, divergence: str = divergence, learned: list[Tensor] = learned) -> float:
                for tensor in learned:
                    tensor.grad = None
                out = fused_head_loss(
                    learned[0], learned[1], DenseTeacher(other, teacher_weight), labels, kd_weight=1.0, ce_weight=0.0,
                    divergence=divergence, temperature=1.0, chunk_tokens=size.chunk, kernel=asked,  # type: ignore[arg-type]
                )  # fmt: skip
                out.loss.backward()  # type: ignore[no-untyped-call]
                return float(out.loss.detach())

            loss = work()
            assert learned[0].grad is not None
            gradient = learned[0].grad.float().clone()
            exact = exact or (loss, gradient)
            away = abs(loss - exact[0]) / max(abs(exact[0]), 1e-12)
            gradient_away = float((gradient - exact[1]).norm() / exact[1].norm().clamp_min(1e-30))
            rows.append(
                {
                    "name": f"head/{divergence}/{name}",
                    "seconds": clock.time(f"head/{divergence}/{name}", work),
                    "loss_apart": away,
                    "gradient_apart": gradient_away,
                    "is_right": away <= _LOSS_APART and gradient_away <= _GRADIENT_APART,  # not for NaN either
                }
            )
            clock.keep({"rows": rows})
    return {"rows": rows, "tokens": size.tokens, "vocabulary": shape[0], "width": shape[1]}


# -- 4: a step by phase --------------------------------------------------------------------------------------


def step(device: torch.device, clock: Clock) -> dict[str, Any]:
    """Steps of a run that is built and thrown away, eager and with bodies compiled, by phase."""
    size, found = size_for(device), []
    least = {phase: [list(one) for one in work] for phase, work in bound(size).items()}
    kernel = choose_kernel("auto", device).name
    modes = [("eager bodies", {"train.compile": "off"})]
    if device.type == "cuda":
        modes.append(("compiled bodies", {"train.compile": "both"}))
        if not facts_of(device).has_native_bf16 and facts_of(device).has_tensor_cores:
            modes.append(("compiled bodies, fp16-mixed", {"train.compile": "both", "precision.mode": "fp16-mixed"}))
    with tempfile.TemporaryDirectory(prefix="stillroom-bench-") as name:
        world = Path(name)
        settings = write_world(world, size)
        for said, over in modes:
            row: dict[str, Any] = {"name": f"{kernel} rows, {said}"}
            try:
                row |= _phases(world / said.replace(" ", "-"), {**settings, **over}, device, clock, row["name"])
            except (StillroomError, RuntimeError) as error:
                row["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            found.append(row)
            clock.keep({"rows": found, "bound": least})
    return {"rows": found, "bound": least}


def write_world(folder: Path, size: Size) -> dict[str, Any]:
    """Both models and text of random words; the settings of a run with them."""
    for name, shape in (("teacher", size.teacher), ("student", size.student)):
        write_llama(folder / name, shape, length=size.length)
    draw = random.Random(0)
    words = [
        " ".join(f"t{draw.randrange(2, size.student.vocabulary)}" for _ in range(size.length + 1))
        for _ in range(8 * size.rows)
    ]
    (folder / "train.txt").write_text("\n\n".join(words) + "\n", encoding="utf-8")
    return {
        "teacher.model": str(folder / "teacher"), "student.model": str(folder / "student"),
        "data.train": str(folder / "train.txt"), "data.eval_share": 0.1, "data.max_length": size.length,
        "train.batch_size": size.rows, "train.max_steps": 1000, "train.learning_rate": 1e-4,
        "objectives.kd.weight": 1.0, "objectives.ce.weight": 0.0, "objectives.kd.temperature": 1.0,
        "telemetry.log_steps": 1000,
    }  # fmt: skip


def _phases(folder: Path, settings: dict[str, Any], device: torch.device, clock: Clock, name: str) -> dict[str, Any]:
    folder.mkdir()
    config = load_config(overrides=settings)
    with EventLog(folder / "events.jsonl") as log:
        run = build_run(config, folder, log, device=device, models=load_models(config, device, folder=folder))
        run.student.train()
        state = RunState(applied=1)  # the first step is sampled for the log
        spans: list[tuple[str, Any, Any]] = []
        with _marked(run, clock, spans):
            for cursor in range(_WARM_UPS):
                train_step(run, state, run.loader.window(cursor))
            clock.wait()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            steps = []
            for cursor in range(_REPEATS):
                spans.clear()
                begin = clock.now()
                outcome = train_step(run, state, run.loader.window(_WARM_UPS + cursor))
                end = clock.now()
                one = dict.fromkeys(PHASES, 0.0)
                for phase, start, stop in spans:
                    one[phase] += clock.between(f"step/{name}/{phase}", start, stop)
                one["all"] = clock.between(f"step/{name}/all", begin, end)
                steps.append(one)
        row: dict[str, Any] = {"seconds": {phase: median(one[phase] for one in steps) for phase in steps[0]}}
        row |= {"precision": run.precision.mode, "verdict": outcome.verdict.action}
        if device.type == "cuda":
            row["peak_allocated"] = torch.cuda.max_memory_allocated(device)
            row["peak_reserved"] = torch.cuda.max_memory_reserved(device)
        return row


@contextmanager
def _marked(run: Any, clock: Clock, spans: list[tuple[str, Any, Any]]) -> Iterator[None]:
    """Time the parts of a step from outside: the step itself knows of no clock."""
    places = ((run.teacher, "observe", "teacher"), (run.student, "observe", "student forward"),
              (run.mix, "score", "head"), (run.precision, "backward", "student backward"),
              (run.optimizer, "squared_norms", "optimizer"), (run.optimizer, "step", "optimizer"))  # fmt: skip
    changed = []
    for owner, method, phase in places:
        plain = getattr(owner, method)

        def marked(*args: Any, plain: Any = plain, phase: str = phase, **options: Any) -> Any:
            begin = clock.now()
            answer = plain(*args, **options)
            spans.append((phase, begin, clock.now()))
            return answer

        object.__setattr__(owner, method, marked)
        changed.append((owner, method))
    try:
        yield
    finally:
        for owner, method in changed:
            object.__delattr__(owner, method)


def bound(size: Size) -> dict[str, list[Kernels]]:
    """What no program of these products can be faster than: each product once, one pass over logits and state."""
    tokens, taught, learns = size.tokens, size.teacher, size.student
    bodies = [2.0 * tokens * shape.layers * shape.layer_parameters for shape in (taught, learns)]
    heads = [2.0 * tokens * shape.vocabulary * shape.width for shape in (taught, learns)]
    logits = 8.0 * tokens * learns.vocabulary
    return {
        "teacher": [Kernels(1, bodies[0], "half", 0.0)],
        "student forward": [Kernels(1, bodies[1], "half", 0.0)],
        "head": [Kernels(1, heads[0] + 3 * heads[1], "half", 0.0), Kernels(1, 0.0, "half", logits)],
        "student backward": [Kernels(1, 2 * bodies[1], "half", 0.0)],
        "optimizer": [Kernels(1, 0.0, "half", 28.0 * learns.num_parameters)],
    }


# -- 5: a distillation ---------------------------------------------------------------------------------------

_SECONDS, _COMPARED_STEPS = 60.0, 8


def distillation(device: torch.device, clock: Clock) -> dict[str, Any]:
    """A minute of the embedded demo, and how far its first losses are from FP32 on the CPU."""
    with tempfile.TemporaryDirectory(prefix="stillroom-bench-") as name:
        folder = Path(name)
        settings = {"data.train_share": 0.01, "telemetry.log_steps": 1, "eval.max_batches": 2, "eval.samples": 0}
        found = _run(folder / "here", {**settings, "train.max_minutes": _SECONDS / 60}, str(device))
        if device.type == "cpu" or "error" in found:
            return _without_losses(found)
        short = {**settings, "train.max_steps": _COMPARED_STEPS, "precision.mode": "fp32"}
        exact = _run(folder / "cpu", short, "cpu")
        # The first step alone: a schedule over fewer steps has other learning rates afterwards.
        pairs = list(zip(found["losses"][:1], exact["losses"][:1], strict=False))
        found["first_loss_apart"] = max((abs(a - b) / max(abs(b), 1e-9) for a, b in pairs), default=None)
        return _without_losses(found)


def _without_losses(found: dict[str, Any]) -> dict[str, Any]:
    losses = found.pop("losses")
    return {**found, "steps": len(losses), "first_loss": losses[:1], "last_loss": losses[-1:]}


def _run(folder: Path, settings: dict[str, Any], device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        found["status"] = distill(load_config(preset="demo", overrides=settings), folder, device=device).summary[
            "status"
        ]
    except (StillroomError, RuntimeError) as error:  # one that stops in time is interrupted
        found["status"] = type(error).__name__
        if type(error).__name__ not in ("Interrupted", "NoBetterStudent"):
            found["error"] = str(error).partition("\n")[0]
    log = folder / "events.jsonl"
    events = list(read_events(log)) if log.exists() else []
    steps = [event for event in events if event["event"] == "step"]
    found["losses"] = [event["train_loss"] for event in steps if event["train_loss"] is not None]
    late = steps[len(steps) // 2 :]
    found["tokens_per_second"] = median(event["tokens_per_second"] for event in late) if late else None
    found["skipped"] = sum(event["verdict"] == "skip" for event in steps)
    return found


PARTS: dict[str, Callable[[torch.device, Clock], dict[str, Any]]] = {
    "facts": facts,
    "constants": constants,
    "kernels": kernels,
    "step": step,
    "distillation": distillation,
}


def rates_of(found: dict[str, Any]) -> Rates | None:
    """The measured rates, of the part `constants`."""
    rates = found.get("constants", {}).get("rates")
    return Rates(**rates) if rates else None
