"""Laws of the table of packed families: what is committed is what is found, and the page says it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "data"))
import packed_families

ROOT = Path(__file__).parents[2]
FOUND = json.loads(packed_families.RESULT.read_text())
SAMPLE = ["llama", "gemma3_text", "gptj", "opt", "mixtral", "mamba", "bloom", "bert"]


@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_is_packed_or_refused_as_the_table_says(family: str) -> None:
    found, kept = packed_families.tried(family), FOUND["families"][family]
    assert found["verdict"] == kept["verdict"] and found.get("attention") == kept.get("attention")
    if found["verdict"] == "packed":
        assert max(found["worst"], kept["worst"]) <= packed_families.TOLERANCE


def test_no_family_that_a_run_packs_has_another_loss() -> None:
    assert "different" not in FOUND["verdicts"]


def test_the_page_names_each_family_that_is_refused() -> None:
    page = re.sub(r"<!--.*?-->", "", (ROOT / "docs" / "guides" / "data.md").read_text())
    refused = [name for name, one in FOUND["families"].items() if one["verdict"] == "refused"]
    assert refused and all(f"`{name}`" in page for name in refused)
    assert f"{FOUND['verdicts']['packed']} families" in page
