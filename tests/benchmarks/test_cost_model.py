"""Laws of the cost model of a step: what time, a bound and a fused kernel are, and that a recorded step adds up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
import cards
import design
import fusion
import recorder

from stillroom.precision.gpus import find_gpu

FOLDER = Path(cards.__file__).parent
T4 = cards.CARDS[0]


def kernel(name: str = "mul", phase: str = "teacher", **options: Any) -> recorder.Kernel:
    given = {
        "flops": 0,
        "dtype": "float32",
        "bytes_read": 0,
        "bytes_written": 0,
        "launches": 1,
        "shape": (8,),
        **options,
    }
    return recorder.Kernel(name, phase, **given)


def test_a_product_takes_the_longer_of_arithmetic_and_memory() -> None:
    heavy = kernel("mm", flops=65 * 10**12, dtype="float16", bytes_read=10**9)
    assert T4.kernel_seconds(heavy) == pytest.approx(1.0)
    assert T4.kernel_seconds(replace(heavy, dtype="float32")) == pytest.approx(65 / 8.1)
    assert T4.kernel_seconds(replace(heavy, bytes_read=640 * 10**9)) == pytest.approx(2.0)


def test_small_kernels_take_as_long_as_the_host_needs_to_issue_them() -> None:
    spent = cards.seconds_by_phase([kernel() for _ in range(1000)], T4)
    assert spent["teacher"] == pytest.approx(1000 * cards.HOST_SECONDS, rel=0.01)


def test_the_host_runs_ahead_until_it_reads() -> None:
    slow = kernel(bytes_read=32 * 10**6)  # 0.1 ms
    small = [kernel(phase="optimizer")] * 10
    ahead = cards.seconds_by_phase([slow, *small], T4)
    waiting = cards.seconds_by_phase([slow, kernel("host read", waits=True), *small], T4)
    assert ahead["optimizer"] == pytest.approx(10 * cards.LEAST_SECONDS)
    assert waiting["optimizer"] == pytest.approx(10 * cards.HOST_SECONDS, rel=0.1)


def test_no_stream_is_faster_than_its_bound() -> None:
    stream = [
        kernel("mm", "head", flops=10**12, dtype="float32", bytes_read=10**8),
        kernel("mm", "teacher", flops=10**12, dtype="float16", bytes_read=10**8),
        kernel("mul", "head", bytes_read=2 * 4 * 64 * 1000),
        kernel("_fused_adamw_", "optimizer", bytes_read=16 * 10**6, bytes_written=12 * 10**6),
    ]
    least = cards.bound(stream, T4, tokens=64, vocabulary=1000, num_trained=10**6)
    assert sum(cards.seconds_by_phase(stream, T4).values()) >= least.step
    assert least.head == pytest.approx(10**12 / 65e12 + 2 * 4 * 64 * 1000 / 320e9)


def test_what_is_made_and_used_inside_a_fused_kernel_is_never_written() -> None:
    sizes = dict.fromkeys(range(5), 100)
    stream = [
        kernel("mm", flops=1, writes=(0,), sizes=sizes),
        kernel("mul", reads=(0,), writes=(1,), sizes=sizes, bytes_read=100, bytes_written=100),
        kernel("add", reads=(1, 2), writes=(3,), sizes=sizes, bytes_read=200, bytes_written=100),
        kernel("mm", flops=1, reads=(3,), writes=(4,), sizes=sizes),
    ]
    fused = fusion.compiled(stream, {"teacher"})
    assert [one.name for one in fused] == ["mm", "fused", "mm"]
    assert (fused[1].bytes_read, fused[1].bytes_written, fused[1].launches) == (200, 100, 1)
    assert fusion.compiled(stream, {"head"}) == stream


def test_a_value_that_the_backward_needs_is_written() -> None:
    sizes = dict.fromkeys(range(5), 100)
    stream = [
        kernel("mul", reads=(0,), writes=(1,), sizes=sizes),
        kernel("add", reads=(1,), writes=(2,), sizes=sizes),
        kernel("mm", flops=1, reads=(2,), writes=(3,), sizes=sizes),
        kernel("mm", phase="student backward", flops=1, reads=(1, 3), writes=(4,), sizes=sizes),
    ]
    assert fusion.compiled(stream, {"teacher"})[0].bytes_written == 200


def test_a_row_too_long_for_registers_is_read_again_after_each_reduction() -> None:
    sizes = {0: 1000, 1: 10, 2: 1000}
    options = {"sizes": sizes, "row_length": 50_000}
    stream = [
        kernel("amax", reads=(0,), writes=(1,), reduces="row", **options),
        kernel("sub", reads=(0, 1), writes=(2,), **options),
    ]
    assert fusion.compiled(stream, {"teacher"})[0].bytes_read == 2000
    short = [replace(one, row_length=500) for one in stream]
    assert fusion.compiled(short, {"teacher"})[0].bytes_read == 1000


@pytest.mark.parametrize(("dtype", "written"), [("float16", 2), ("float32", 4)])
def test_a_row_kernel_of_another_divergence_moves_its_own_bytes(dtype: str, written: int) -> None:
    """And where the teacher's answers are stored, no product makes its logits."""
    logits = {"flops": 10, "dtype": "float16", "shape": (8, 1000)}
    chunk = [
        kernel("mm", "head", bytes_read=1, **logits), kernel("mm", "head", bytes_read=2, **logits),
        kernel(design.ROW_KERNEL, "head", dtype=dtype, shape=(8, 1000)), kernel("mm", "head", flops=10, shape=(8, 64)),
    ]  # fmt: skip
    made = design.with_row_kernel(chunk * 2, (24.0, 2.0), vocabulary=1000)
    assert [one.name for one in made] == ["mm", "mm", "row kernel", "mm"] * 2
    assert (made[2].bytes_read, made[2].bytes_written) == (24 * 8000, written * 8000)
    stored = design.with_row_kernel(chunk * 2, (4.0, 2.0), vocabulary=1000, is_sparse=True)
    assert [(one.name, one.bytes_read) for one in stored if one.shape == (8, 1000)] == [
        ("mm", 1), ("row kernel", 4 * 8000),
    ] * 2  # fmt: skip


def test_one_kernel_of_adamw_moves_28_bytes_a_parameter_and_the_norm_reads_gradients() -> None:
    stream = [kernel("mul", "optimizer", bytes_read=9), kernel("host read", "optimizer", waits=True), kernel()]
    made = design.with_fused_adamw(stream, 10**6, gradient_bytes=2)
    moved = {one.name: one.bytes_read + one.bytes_written for one in made if one.phase == "optimizer"}
    assert moved == {"norm": 2 * 10**6 + 4096, "host read": 0, "fused AdamW": 28 * 10**6}
    assert made[0].phase == "teacher" and made[2].waits, "the host reads the norm before the update"


def test_kernels_that_are_alike_are_counted_and_keep_their_time() -> None:
    stream = [kernel("mm", flops=10**9, dtype="float16")] * 3 + [kernel(bytes_read=10**6)]
    groups = design.grouped(stream)
    assert [one.number for one in groups] == [3, 1]
    gpu = find_gpu("T4")
    assert sum(one.seconds(gpu.peak) for one in groups) == pytest.approx(sum(map(T4.kernel_seconds, stream)))


_STEP = """
import sys; sys.path.insert(0, {folder!r})
import guard, json, streams, torch
from cards import CARDS
from cost_model import record, CONTENDERS
from shapes import Problem, Shape
problem = Problem("small", Shape(2, 64, 128, 4, 2), Shape(1, 64, 128, 4, 2), rows=2, length=32)
ours, one = (record(CONTENDERS[name], problem, CARDS[0]) for name in ("stillroom", "row kernel"))
rows = [kernel for kernel in one.kernels if kernel.name == "row kernel"]
products = {{}}
for kernel in one.kernels:
    if kernel.is_product and kernel.phase == "teacher" and kernel.name == "mm":
        products[kernel.dtype] = products.get(kernel.dtype, 0) + kernel.flops
print(json.dumps({{"reads": one.host_reads, "products": products, "peak": one.peak_bytes, "rest": one.resting_bytes,
                  "trained": problem.student.num_parameters, "taught": problem.teacher.num_parameters,
                  "phases": sorted({{kernel.phase for kernel in one.kernels}}),
                  "less": ours.peak_bytes - one.peak_bytes,
                  "rows": [(kernel.bytes_read / 64 / 49152, kernel.bytes_written / 64 / 49152) for kernel in rows],
                  "adds": [kernel.shape for kernel in one.kernels if kernel.name == "addmm" and kernel.phase == "head"],
                  "large": [kernel.name for kernel in one.kernels if kernel.phase == "head" and not kernel.is_product
                            and kernel.shape[-1:] == (49152,)]}}))
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="the fake card of the cost model needs g++")
@pytest.mark.slow
def test_a_recorded_step_reads_once_and_holds_what_it_must() -> None:
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"}
    code = _STEP.format(folder=str(FOLDER))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["reads"] == 1
    # Two layers of 64 tokens: q and o [64, 64], k and v [64, 32], three of the MLP [64, 128].
    assert found["products"] == {"float16": 2 * 2 * 64 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)}
    held = 14 * found["trained"] + 2 * found["taught"]  # FP16 weights, FP32 masters and moments, a half teacher
    assert held <= found["rest"] <= 1.02 * held
    assert found["peak"] > found["rest"] + 2 * found["trained"]
    assert {"teacher", "student forward", "head", "student backward", "optimizer"} <= set(found["phases"])
    # One launch of the row kernel, nothing else as large as the logits, and powers of two are cuBLAS's alpha.
    assert found["rows"] == [[pytest.approx(8, rel=0.02), pytest.approx(2, rel=0.02)]]
    assert found["large"] == ["row kernel"]
    assert found["adds"] == [[64, 64], [49152, 64]]
    assert found["less"] > 0.99 * 2 * 64 * 49_152, "the half gradient is written over the logits"


@pytest.mark.skipif(shutil.which("g++") is None, reason="the fake card of the cost model needs g++")
@pytest.mark.slow
def test_the_model_of_a_compiler_moves_what_inductor_moves() -> None:
    """A layer's forward and backward: inductor's own schedule for a T4, from this torch, against `fusion.py`."""
    pytest.importorskip("triton")
    script = [sys.executable, str(FOLDER / "inductor.py")]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["layers"]
    assert set(found) == {"teacher, forward", "student, forward", "student, backward"}
    for name, one in found.items():
        assert one["inductor"] <= one["model"] <= 1.2 * one["inductor"], name
