"""The test scripts of the guides: what they check of the installation, as trials with a verdict each."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from _seed import sar
from _seed.output import boxed, say
from _seed.precision import mode_lines, wanted_mode
from stillroom.cli.exit import run_to_its_end
from stillroom.core.errors import SelftestFailed

Trial = tuple[str, Callable[[], bool]]

# What the guide's own check trains, cut to what a small machine does in seconds.
_SHORT_RUN = shlex.split(
    "--train_steps 5 --model_dtype float16 --per_device_batch_size 1 --grad_accum_steps 1 --eval_steps 5 "
    "--student_lr 1e-6 --temperature 1.2 --alpha_kd 0.01 --alpha_ce 0.99 --block_size 64 "
    "--set data.train_share=0.01 --set eval.max_batches=4 --set eval.samples=1 --set eval.sample_tokens=8"
)


def run_trials(title: str, trials: Sequence[Trial], arguments: Sequence[str] | None) -> int:
    """Run trials, print PASS or FAIL for each and the sum, and return the exit code."""
    argparse.ArgumentParser(description=title).parse_args(arguments)
    return run_to_its_end(lambda: _run(title, trials), ())


def _run(title: str, trials: Sequence[Trial]) -> int:
    outcomes: dict[str, bool] = {}
    for name, trial in trials:
        say(f"--- {name} ---")
        outcomes[name] = trial()
    passed = sum(outcomes.values())
    lines = [f"{'PASS' if is_passed else 'FAIL'} {name}" for name, is_passed in outcomes.items()]
    say("", *boxed(title, [*lines, f"Total: {passed}/{len(outcomes)} tests passed"]))
    return 0 if passed == len(outcomes) else SelftestFailed.exit_code


def selftest_of(group: str) -> Callable[[], bool]:
    """A group of `stillroom selftest`."""

    def trial() -> bool:
        import torch

        from stillroom.doctor.printed import selftest_lines
        from stillroom.doctor.selftest import selftest

        report = selftest(torch.device("cpu"), only=(group,))
        say(*selftest_lines(report.to_dict()))
        return not report.failed

    return trial


def short_run() -> bool:
    """The ultra-stable recipe, five steps."""
    with tempfile.TemporaryDirectory(prefix="stillroom-recipe-") as folder:
        return sar.main(sar.ULTRA_STABLE, [*_SHORT_RUN, "--output-dir", f"{folder}/run"]) == 0


def four_modes() -> bool:
    """The decision and the message of each of the guide's four modes."""
    from stillroom.precision.device import DeviceFacts
    from stillroom.precision.policy import choose

    card = DeviceFacts("cuda", "Tesla T4", memory_bytes=16_000_000_000, architecture="sm_75")
    cases = [
        ("Mixed precision, FP32 parameters", wanted_mode("float32", True), card, "fp16-mixed"),
        ("Full FP16, FP16 parameters", wanted_mode("float16", None), card, "fp16-split"),
        ("Full FP32", wanted_mode("float32", False), card, "fp32"),
        ("CPU", wanted_mode("float32", None), DeviceFacts("cpu"), "fp32"),
    ]
    is_right = True
    for name, asked, facts, expected in cases:
        mode, reason = choose(str(asked), facts)
        is_right &= mode == expected
        say(f"{name}: {'ok' if mode == expected else f'WRONG, expected {expected}'}")
        say(*(f"  {line}" for line in mode_lines(_start(str(asked), mode, reason), facts.kind)))
    return is_right


def _start(asked: str, mode: str, reason: str) -> Mapping[str, Any]:
    """The part of a run's first record that says what was chosen."""
    return {
        "precision": {"mode": mode, "reason": reason},
        "config": {"precision": {"mode": asked, "initial_loss_scale": 65536.0}},
    }
