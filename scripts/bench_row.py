"""Check a block that `stillroom bench` printed, and add it as a row to docs/results/gpus.md.

python scripts/bench_row.py block.txt            # or - for stdin
python scripts/bench_row.py block.txt --check    # check it and print the row
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

from stillroom.bench.run import read_block
from stillroom.core.errors import DataError

PAGE = Path(__file__).parents[1] / "docs" / "results" / "gpus.md"


def row(found: dict[str, Any]) -> str:
    """The row of a block. Names come from anywhere: what is no plain word is taken out."""
    rates, versions = found["rates"], found["versions"]
    steps = {name: one["all"] for name, one in found["steps"].items() if isinstance(one, dict)}
    name, best = min(steps.items(), key=lambda pair: pair[1]) if steps else ("", None)
    ratios = [pair for pair in found["ratios"].values() if isinstance(pair, list) and len(pair) == 2]
    by_sheet, by_own = ([pair[place] for pair in ratios if pair[place] is not None] for place in (0, 1))
    failed = found.get("selftest_failed") or []
    cells = [
        found["device"], versions.get("torch", "?"), found["kernel"], _number(rates.get("half"), 1e-12),
        _number(rates.get("bandwidth"), 1e-9), f"{_number(best, 1e3)} ({name})",
        _number((found.get("x_bound") or {}).get(name)), _number(median(by_sheet) if by_sheet else None),
        _number(median(by_own) if by_own else None), f"{len(failed)} failed" if failed else "passed",
    ]  # fmt: skip
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _number(value: Any, factor: float = 1.0) -> str:
    return f"{factor * float(value):.3g}" if isinstance(value, int | float) else "-"


def _plain(text: object) -> str:
    return re.sub(r"[^A-Za-z0-9 .,()+_/-]", "", str(text))[:60]


def main(words: list[str]) -> int:
    name, *rest = words or ["-"]
    text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8", errors="replace")
    try:
        made = row(read_block(text))
    except (DataError, TypeError, ValueError, KeyError) as error:
        print(f"not added: {error}")
        return 2
    print(made)
    if "--check" in rest:
        return 0
    page = PAGE.read_text(encoding="utf-8")
    if made in page:
        print("not added: the row is there already")
        return 0
    PAGE.write_text(page.rstrip("\n") + f"\n{made}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
