"""Every block of Python in docs/guides/python.md and trainer.md runs, in the page's order, with the files it names."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "guides" / "python.md"


def blocks(page: Path = PAGE) -> list[tuple[int, str]]:
    """(line of the page, code) of each block."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


@pytest.fixture
def reader(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader of the page would stand."""
    for model in ("teacher", "student"):
        shutil.copytree(world / model, tmp_path / "models" / model)
    shutil.copy(world / "train.jsonl", tmp_path / "texts.jsonl")
    lines = [json.loads(line)["text"] for line in (world / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    names = {"teacher": ("model", "models/teacher"), "student": ("model", "models/student")}
    sections = {**names, "data": ("train", "texts.jsonl")}
    (tmp_path / "run.toml").write_text(
        "".join(f'[{section}]\n{key} = "{value}"\n' for section, (key, value) in sections.items()), encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_of_the_page_runs(reader: Path) -> None:
    names: dict[str, object] = {"__name__": "page"}
    for line, code in blocks():
        # The lines of a traceback are those of the page.
        exec(compile("\n" * line + code, str(PAGE), "exec"), names)
    done = [path.parent.name for path in sorted(reader.glob("runs/*/report.html"))]
    kinds = [f"kind-{number}" for number in range(4)]
    assert done == ["configured", "cut", *kinds, "named", "objects", "watched"]
    assert len((reader / "losses.csv").read_text().splitlines()) == 15
    assert len(names["losses"]) == 20  # type: ignore[arg-type]
    texts = {(reader / "runs" / kind / "inputs" / "train.jsonl").read_bytes() for kind in kinds}
    assert len(texts) == 1, "the same records, however they are given"


def test_every_block_of_the_trainer_s_page_runs(reader: Path) -> None:
    page, names = PAGE.with_name("trainer.md"), dict[str, object]()
    for line, code in blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), names)
    entries = names["trainer"].state.log_history  # type: ignore[attr-defined]
    assert any("train_loss" in entry for entry in entries)


def test_the_page_names_what_the_package_offers() -> None:
    import stillroom

    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in stillroom.__all__ if name not in text] == []
