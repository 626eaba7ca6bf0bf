"""No link of README and docs leads nowhere, and the site has every page of docs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
build_docs: Any = importlib.import_module("build_docs")


def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading() -> None:
    files, broken = build_docs.reachable(ROOT)
    assert broken == []
    assert len(files) > 30


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """A small repository with one page in docs."""
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        (tmp_path / name).write_text("# Some words, `code`\n\n## Here & there\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a](missing.md)", "missing.md does not exist"),
        ("[a](../README.md#no-such)", "has no such heading"),
        ("[a](../../outside.md)", "does not exist"),
        ("[a](.)", "is a folder"),
        ("![a](images/a.png)", "a.png does not exist"),
        ("[a](../README.md#some-words-code)", ""),
        ("[a](../README.md#here--there)", "has no such heading"),
        ("[a](https://example.org/missing.md) `[b](missing.md)`", ""),
        ("```\n[a](missing.md)\n```", ""),
    ],
)
def test_a_broken_link_is_named(pages: Path, text: str, complaint: str) -> None:
    (pages / "docs" / "page.md").write_text(text + "\n", encoding="utf-8")
    _files, broken = build_docs.reachable(pages)
    assert [complaint in line for line in broken] == ([True] if complaint else [])


def named(tree: Any) -> set[str]:
    if isinstance(tree, str):
        return {tree}
    return {name for one in (tree.values() if isinstance(tree, dict) else tree) for name in named(one)}


def test_the_site_lists_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = {page.relative_to(ROOT).as_posix() for page in build_docs.first_pages(ROOT)}
    assert named(nav) == pages
