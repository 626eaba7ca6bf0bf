"""The self-test passes on a sound installation, covers all there is, and names what is broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
import torch

from stillroom.core.types import Verdict
from stillroom.doctor.selftest import GROUPS, Measured, Report, Trial, run_trials, selftest, worst
from stillroom.losses import divergences
from stillroom.losses.head import kernel
from stillroom.losses.head import kernel as compiled
from stillroom.losses.head.kernel import keep
from stillroom.precision.policy import POLICIES
from stillroom.training.guard import Guard

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(kernel.choose_kernel("auto").name != "compiled", reason="no compiled kernel here")


def of(*groups: str) -> Report:
    return selftest(CPU, only=groups)


def failures(report: Report) -> dict[str, str]:
    return {f"{one.group}: {one.name}": one.why for one in report.failed}


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    """The command as a user runs it, in a pipe."""
    done = subprocess.run(
        [sys.executable, "-m", "stillroom", "selftest", "--device", "cpu", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_sound_installation_passes_every_trial(whole: dict[str, Any]) -> None:
    assert whole["passed"] and whole["failed"] == []
    assert {trial["status"] for trial in whole["trials"]} <= {"passed", "not run"}
    assert tuple(dict.fromkeys(trial["group"] for trial in whole["trials"])) == GROUPS


def test_everything_that_can_be_chosen_has_a_trial(whole: dict[str, Any]) -> None:
    names = {group: [one["name"] for one in whole["trials"] if one["group"] == group] for group in GROUPS}
    for name in divergences.names():
        assert any(trial.startswith(name) for trial in names["divergences"]), name
        assert any(trial.startswith(f"plain, {name}") for trial in names["kernels"]), name
    for mode in POLICIES:
        assert sum(trial.startswith(f"{mode}:") for trial in names["precision"]) == 5, mode


# -- what is broken is found -----------------------------------------------------------------------------


@pytest.fixture
def wrong_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiled kernel in the cache, under the name of the right one, whose total variation is twice too steep."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    assert compiler is not None
    source = Path(shutil.copytree(Path(compiled.__file__).with_name("native"), tmp_path / "native"))
    text = (source / "maths.h").read_text()
    wrong = text.replace("slope = q > p ? 0.5f * q", "slope = q > p ? 1.0f * q")
    assert wrong != text
    (source / "maths.h").write_text(wrong)
    made = tmp_path / "rows.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-fopenmp"]
    between = [str(tmp_path / f"{file.stem}.o") for file in sorted(source.glob("*.cpp"))]
    for file, target in zip(sorted(source.glob("*.cpp")), between, strict=True):
        subprocess.run([compiler, *flags, "-c", str(file), "-o", target], check=True)
    subprocess.run([compiler, "-shared", *between, "-o", str(made)], check=True)
    monkeypatch.setenv("STILLROOM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "stillroom" / "kernels"
    folder.mkdir(parents=True, mode=0o700)
    path = keep(made, folder, f"rows-{compiled._fingerprint(compiler)}")
    for cached in (compiled.build, kernel._compiled):
        cached.cache_clear()
    yield path
    for cached in (compiled.build, kernel._compiled):
        cached.cache_clear()


@needs_compiler
def test_a_wrong_compiled_kernel_is_found_and_named(wrong_kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel.choose_kernel("auto").name == "compiled", "its own small comparison does not see it"
    code, out, err = commands.run(capsys, "selftest", "--only", "kernels", "--device", "cpu")
    assert code == 20
    assert "compiled, total_variation, dense: the gradient is off by" in " ".join(out.split())
    assert "plain," not in out and "forward_kl" not in out
    assert str(wrong_kernel) in err.replace("\n", "").replace(" ", ""), "the advice names the file"
    code, out, _err = commands.run(capsys, "selftest", "--only", "kernels", "--device", "cpu", "--json")
    assert code == 20
    found = json.loads(out)
    assert not found["passed"] and all("compiled, total_variation" in name for name in found["failed"])


def test_a_wrong_slope_of_a_divergence_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = divergences.ReverseKL.evaluate

    def wrong(self: Any, student: Any, teacher: Any, *, wants_teacher: bool) -> Any:
        found = evaluate(self, student, teacher, wants_teacher=wants_teacher)
        found.student.mul_(1.01)
        return found

    monkeypatch.setattr(divergences.ReverseKL, "evaluate", wrong)
    found = failures(of("divergences"))
    assert list(found) == ["divergences: reverse_kl"] and "gradient" in found["divergences: reverse_kl"]


def test_a_wrong_loss_of_the_head_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from stillroom.losses.head.kernel import CompiledKernel
    from stillroom.losses.head.rows import PlainKernel

    for kind in (PlainKernel, CompiledKernel):

        def wrong(self: Any, student: Any, teacher: Any, rows: Any, plan: Any, run: Any = kind.run) -> None:
            run(self, student, teacher, rows, plan)
            rows.kd.mul_(1.01)

        monkeypatch.setattr(kind, "run", wrong)
    assert "divergences: kd and ce through the head" in failures(of("divergences"))


def test_a_storage_that_rounds_to_nearest_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds' FP16 weights: at a rate of 5e-6 they hardly move."""
    from stillroom.precision.storage import Stochastic

    def to_nearest(storages: Any, values: Any, bits: Any) -> None:
        for storage, part in zip(storages, values.parts, strict=True):
            storage.parameter.data.copy_(part)

    monkeypatch.setattr(Stochastic, "write_all", staticmethod(to_nearest))
    found = failures(of("precision"))
    assert list(found) == ["precision: fp16-sr: updates at 5e-6"]


def test_a_guard_that_keeps_everything_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "judge", lambda self, evidence: Verdict("keep"))
    monkeypatch.setattr("stillroom.training.loop.check_state", lambda *_given: None)
    found = failures(of("guard"))
    assert "guard: logits that are not finite: the batch is left out" in found
    assert "guard: the student of that run is finite" in found


def test_a_resumption_that_forgets_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from stillroom.precision import AdamW

    monkeypatch.setattr(AdamW, "load_tensors", lambda self, saved: None)
    found = failures(of("survival"))
    assert list(found) == ["survival: killed and resumed: the same bits"]


# -- trials ----------------------------------------------------------------------------------------------


def test_a_trial_that_raises_has_failed_and_the_others_are_run() -> None:
    def breaks() -> Measured:
        raise RuntimeError("the card is gone\nand more")

    trials = [Trial("a", "one", breaks), Trial("a", "two", lambda: Measured(0.0, 1.0))]
    first, second = run_trials(trials)
    assert (first.status, first.why) == ("failed", "RuntimeError: the card is gone")
    assert second.status == "passed"


def test_nan_is_worse_than_any_number() -> None:
    nan = float("nan")
    assert worst(Measured(5.0, 1.0), Measured(nan, 1.0, "it")).of == "it"
    (outcome,) = run_trials([Trial("a", "one", lambda: Measured(nan, 1.0, "it"))])
    assert outcome.status == "failed"


def test_a_group_that_is_not_there_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, _out, err = commands.run(capsys, "selftest", "--only", "kernel")
    assert code == 2 and "--only" in err and "kernels" in err


def test_the_table_fits_eighty_columns_and_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = commands.run(capsys, "selftest", "--only", "divergences")
    assert code == 0 and "14 of 14 trials passed" in out
    assert max(map(len, (out + err).splitlines())) <= 80 and "\x1b" not in out + err


def test_trials_that_could_not_be_run_are_told_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stillroom.doctor.selftest.build", lambda: compiled.Built(None, "no C++ compiler found"))
    code, out, _err = commands.run(capsys, "selftest", "--only", "kernels", "--device", "cpu")
    lines = [line for line in out.splitlines() if line.startswith("not run")]
    assert code == 0 and len(lines) == 1 and "no C++ compiler found" in lines[0]
