"""The guides' `python train_sar_kd_fp16_safe.py`. See README.md."""

from __future__ import annotations

from collections.abc import Sequence

from _seed import sar


def main(arguments: Sequence[str] | None = None) -> int:
    return sar.main(sar.FP16_SAFE, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
