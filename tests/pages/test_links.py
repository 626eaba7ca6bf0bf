"""No link of README and docs leads to a file that is not there, and the site has every page of docs.

Anchors are checked by `make docs`: mkdocs refuses one that no page has.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_that_the_site_shows(page: Path) -> None:
    addresses = LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    files = [(page.parent / address).resolve() for address in addresses if not re.match(r"[a-z][a-z+.-]*:", address)]
    assert [path for path in files if not path.is_file()] == []
    shown = {link.name for link in (ROOT / "site").iterdir()}
    assert {path.relative_to(ROOT).parts[0] for path in files} <= shown


def named(tree: Any) -> set[str]:
    if isinstance(tree, str):
        return {tree}
    return {name for one in (tree.values() if isinstance(tree, dict) else tree) for name in named(one)}


def test_the_site_lists_every_page() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert named(nav) == {page.relative_to(ROOT).as_posix() for page in PAGES}


def test_the_site_s_folder_has_links_alone() -> None:
    assert all(link.is_symlink() and link.exists() for link in (ROOT / "site").iterdir())


def test_the_theme_s_scripts_are_part_of_the_site() -> None:
    """Search, the dark scheme and the menu of a narrow page need them; exclude_docs holds for the theme's files too."""
    excluded = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["exclude_docs"].split()
    assert {"!*.js", "!*.css"} <= set(excluded) or "*" not in excluded
