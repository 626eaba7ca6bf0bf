"""A change that should not alter numbers does not: every run is compared with the committed record."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from numbers_record import CASES, RECORD, TWO_PROCESSES, fingerprint, is_fp32, run_case

KEPT: dict[str, Any] = json.loads(RECORD.read_text())
# On another processor sums are added in another order: FP32 runs move in the seventh digit; where a product is rounded
# to half precision one rounding may fall the other way.
_ELSEWHERE = 1e-5
_ELSEWHERE_HALF = 5e-4


def test_the_record_has_every_case() -> None:
    assert set(KEPT["cases"]) == {*CASES, TWO_PROCESSES}


@pytest.mark.parametrize("name", [*CASES, TWO_PROCESSES])
def test_the_numbers_of_a_run_did_not_move(name: str, tmp_path: Path) -> None:
    found, kept = run_case(name, tmp_path / "run"), KEPT["cases"][name]
    if fingerprint() == KEPT["fingerprint"]:
        assert found == kept
        return
    tolerance = _ELSEWHERE if is_fp32(name) else _ELSEWHERE_HALF
    for series in ("losses", "norms"):
        assert len(found[series]) == len(kept[series])
        for now, then in zip(found[series], kept[series], strict=True):
            assert (now == then == "null") or math.isclose(
                float.fromhex(now), float.fromhex(then), rel_tol=tolerance
            ), f"{series}: {float.fromhex(now)} is not {float.fromhex(then)}"
