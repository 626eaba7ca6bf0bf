"""The guides' `python scripts/distill_quantumbench.py`, run from the folder above. See README.md there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Python puts the script's own folder there

from _seed.quantum import main

if __name__ == "__main__":
    raise SystemExit(main())
