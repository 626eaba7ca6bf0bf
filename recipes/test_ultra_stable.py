"""The guides' `python test_ultra_stable.py`: is this installation able to do it? See README.md. No test of pytest's."""

from __future__ import annotations

from collections.abc import Sequence

from _seed.selftests import run_trials, selftest_of, short_run


def main(arguments: Sequence[str] | None = None) -> int:
    trials = [
        ("FP16 Detection", selftest_of("precision")),
        ("Numerical Stability", selftest_of("divergences")),
        ("Ultra-Stable Training", short_run),
    ]
    return run_trials("ULTRA-STABLE TEST SUITE", trials, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
