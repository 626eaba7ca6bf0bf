"""`stillroom bench`: a part that fails costs itself alone, a block is checked, predictions are the cost model's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from stillroom.bench import run
from stillroom.bench.parts import ON_CPU, ON_GPU, PARTS, bound
from stillroom.bench.predictions import body_bytes, judge, predictions, read_predictions
from stillroom.core.errors import ConfigError, DataError
from stillroom.precision.gpus import GPUS, Kernels, Rates, find_gpu, gpu_in, seconds_of

ROOT = Path(__file__).parents[2]
T4 = find_gpu("T4")
RATES = {"half": 24e12, "fp32": 6e12, "bandwidth": 256e9, "launch": 2e-6, "host": 6e-6}
FACTS = {
    "device": "Tesla T4", "kind": "cuda", "architecture": "sm_75", "device_bytes": 15 * 10**9, "driver": "580",
    "cuda_of_torch": "13.0", "versions": {"torch": "2.13.0", "stillroom": "0.1.0"}, "python": "3.12",
    "kernel": "triton", "selftest_failed": [], "selftest_trials": 70,
}  # fmt: skip


def modelled(name: str, rates: Rates = T4.sustained) -> float:
    found = predictions()[name].at(rates)
    assert found is not None
    return found


def measured(name: str, _device: str, _seconds: float) -> dict[str, Any]:
    """What the parts of a T4 that sustains its rates would answer."""
    phases = ("teacher", "student forward", "head", "student backward", "optimizer")
    seconds = {phase: modelled(f"step/triton rows, eager bodies/{phase}") for phase in phases}
    answers: dict[str, dict[str, Any]] = {
        "facts": FACTS,
        "constants": {"rates": vars(T4.sustained)},
        "kernels": {"rows": [{"name": "head/forward_kl/triton", "seconds": modelled("head/forward_kl/triton"),
                              "is_right": True, "loss_apart": 0.0}]},
        "step": {"rows": [{"name": "triton rows, eager bodies", "seconds": {**seconds, "all": sum(seconds.values())},
                           "peak_allocated": 3 * 10**9}],
                 "bound": {phase: [list(one) for one in work] for phase, work in bound(ON_GPU).items()}},
        "distillation": {"status": "Interrupted", "steps": 100, "tokens_per_second": 9000.0},
    }  # fmt: skip
    return answers[name]


def test_every_part_is_written_before_the_next_begins(tmp_path: Path) -> None:
    out, seen = tmp_path / "bench.json", []

    def watched(name: str, device: str, seconds: float) -> dict[str, Any]:
        seen.append(set(json.loads(out.read_text())) & set(PARTS) if out.exists() else set())
        return {"error": "it died"} if name == "constants" else measured(name, device, seconds)

    result = run.bench("cpu", out=out, run=watched)
    assert [len(one) for one in seen] == [0, 1, 2, 3, 4]
    assert result["constants"] == {"error": "it died"}
    judged = result["verdict"]["judged"]
    assert all(one["at_measured"] is None and one["at_published"] for one in judged if "memory" not in one["name"])
    assert "it died" in "\n".join(run.lines_of(result)) and json.loads(run.block(result).splitlines()[1])["errors"]


def test_no_part_has_all_the_time() -> None:
    limits: dict[str, float] = {}

    def noted(name: str, device: str, seconds: float) -> dict[str, Any]:
        limits[name] = seconds
        return measured(name, device, seconds)

    run.bench("cpu", minutes=10, run=noted)
    assert set(limits) == set(PARTS) and max(limits.values()) <= 0.4 * 600
    run.bench("cpu", minutes=10, parts=["facts"], run=noted)
    assert limits["facts"] > 590


def test_what_a_part_found_before_it_died_or_hung_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, time; print({mark!r} + '{{\"rows\": [1]}}', flush=True); {end}"
    ours = subprocess.run
    for end, said in (("sys.exit(3)", "ended with 3"), ("time.sleep(60)", "not finished")):
        text = code.format(mark=run._MARK, end=end)
        monkeypatch.setattr(
            run.subprocess, "run", lambda _words, text=text, **options: ours([sys.executable, "-c", text], **options)
        )
        found = run.run_part("step", "cpu", 2.0)
        assert found["rows"] == [1] and said in found["error"]
        monkeypatch.undo()


def test_a_part_without_time_is_not_begun() -> None:
    result = run.bench("cpu", minutes=0.001, run=measured)
    assert all("error" in result[name] for name in PARTS)
    assert run.read_block(run.block({**result, "constants": {"rates": RATES}, "facts": FACTS}))["errors"]


def test_parts_are_named() -> None:
    with refused(ConfigError, "--part", *PARTS):
        run.bench("cpu", parts=["everything"])
    assert set(run.bench("cpu", parts=["step"], run=measured)) & set(PARTS) == {"step"}


def test_a_part_in_its_own_process_answers_or_runs_out_of_time() -> None:
    found = run.run_part("constants", "cpu", 120)
    assert "error" not in found, found
    assert all(found["rates"][name] > 0 for name in RATES)
    assert "process ended" in run.run_part("no such part", "cpu", 120)["error"]


def test_a_block_holds_the_figures_and_is_short() -> None:
    text = run.block(run.bench("cpu", run=measured))
    assert len(text) < 3500
    found = run.read_block(f"Some words\n```\n{text}\n```\n")
    assert found["device"] == "Tesla T4"
    assert found["ratios"]["head/forward_kl/triton"][1] == pytest.approx(1.0, rel=1e-3)
    assert found["x_bound"]["triton rows, eager bodies"] > 1


def test_a_block_that_was_changed_or_cut_is_refused() -> None:
    text = run.block(run.bench("cpu", run=measured))
    head, body = text.splitlines()
    for damaged in ("", head, body, f"{head}\n{body[:-1]}", text.replace("Tesla T4", "Tesla T5"), text + "x" * 30_000):
        with refused(DataError, "block"):
            run.read_block(damaged)
    for other in ("[1]", "{}", '{"device":3}', "not json"):
        with refused(DataError, "block"):
            run.read_block(f"stillroom-bench 1 sha256:{run._checksum(other)}\n{other}")


def test_a_slower_measurement_is_outside_and_an_unpredicted_one_has_no_verdict() -> None:
    name = "head/forward_kl/triton"
    slow = judge({name: 2 * modelled(name), "head/forward_kl/other": 1.0}, published=T4.peak, own=T4.sustained)
    assert [one.name for one in slow] == [name]
    assert slow[0].at_measured == pytest.approx(2.0) and slow[0].is_inside is False
    assert judge({name: 1.0}, published=None, own=None)[0].is_inside is None


def test_the_predictions_in_the_package_are_those_of_the_result_file() -> None:
    """Phase by phase, up to what the host runs ahead between phases."""
    result = json.loads((ROOT / "benchmarks/gpu/results/cost_model.json").read_text())
    rows = result["problems"][read_predictions()["problem"]]["T4"]["rows"]
    pairs = {"inductor rows, eager bodies": "stillroom", "triton rows, eager bodies": "row kernel",
             "triton rows, compiled bodies": "row kernel, bodies compiled"}  # fmt: skip
    for ours, theirs in pairs.items():
        for phase in ("teacher", "student forward", "head", "student backward", "optimizer"):
            expected = rows[theirs]["seconds_by_phase"][phase]
            assert modelled(f"step/{ours}/{phase}", T4.peak) == pytest.approx(expected, rel=0.03), (ours, phase)
        assert predictions()[f"memory/{ours}"].value == rows[theirs]["peak_bytes"]


def test_the_step_that_is_measured_is_the_one_that_was_predicted() -> None:
    known = read_predictions()
    assert known["tokens"] == ON_GPU.tokens and known["vocabulary"] == ON_GPU.student.vocabulary
    for phase, work in bound(ON_GPU).items():
        least = seconds_of(work, T4.peak)
        assert least <= modelled(f"step/triton rows, compiled bodies/{phase}", T4.peak), "nothing beats its bound"
    assert sum(seconds_of(work, T4.peak) for work in bound(ON_CPU).values()) > 0
    assert body_bytes("eager", "student forward") > body_bytes("compiled", "student forward") > 0


def test_kernels_take_the_longest_of_arithmetic_memory_and_launches() -> None:
    rates = Rates(half=1e12, fp32=1e11, bandwidth=1e9, launch=1e-6, host=1e-9)
    assert Kernels(2, 1e12, "half", 1.0).seconds(rates) == pytest.approx(2.0)
    assert Kernels(1, 1e12, "fp32", 1.0).seconds(rates) == pytest.approx(10.0)
    assert Kernels(1, 0.0, "half", 3e9).seconds(rates) == pytest.approx(3.0)
    assert Kernels(10, 0.0, "half", 1.0).seconds(rates) == pytest.approx(1e-5)
    assert seconds_of([Kernels(1000, 0.0, "half", 0.0)], Rates(1, 1, 1, launch=1e-6, host=1e-5)) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("name", "known"),
    [("Tesla T4", "T4"), ("NVIDIA A100-SXM4-40GB", "A100"), ("NVIDIA L40S", None), ("Tesla V100-SXM2-16GB", "V100")],
)
def test_a_gpu_is_known_by_a_word_of_its_name(name: str, known: str | None) -> None:
    found = gpu_in(name)
    assert (found.name if found else None) == known


def test_the_memory_of_a_gpu_is_what_torch_shows_and_not_what_is_on_the_box() -> None:
    assert T4.memory_bytes == int(14.56 * 2**30)
    printed = {"T4": 16, "V100": 16, "P100": 16, "L4": 24, "A100": 40, "H100": 80}
    assert all(0.9 * printed[gpu.name] < gpu.memory_bytes / 2**30 < printed[gpu.name] for gpu in GPUS)
