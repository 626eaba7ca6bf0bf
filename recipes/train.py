"""The guides' `python train.py --config FILE`. See README.md."""

from __future__ import annotations

from _seed.aware import train as main

if __name__ == "__main__":
    raise SystemExit(main())
