"""The guides' `python diagnose_and_fix.py --config FILE`. See README.md."""

from __future__ import annotations

from _seed.aware import diagnose_and_fix as main

if __name__ == "__main__":
    raise SystemExit(main())
