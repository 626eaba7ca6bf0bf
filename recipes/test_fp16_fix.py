"""The guides' `python test_fp16_fix.py`: the four precision modes, and updates of FP16 weights. See README.md."""

from __future__ import annotations

from collections.abc import Sequence

from _seed.selftests import four_modes, run_trials, selftest_of


def main(arguments: Sequence[str] | None = None) -> int:
    trials = [("Training Modes", four_modes), ("FP16 Updates", selftest_of("precision"))]
    return run_trials("FP16 FIX TEST SUITE", trials, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
