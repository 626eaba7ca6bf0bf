"""Build the site: lay out all pages and what they link to as they lie in the repository, then run mkdocs on them.

python scripts/build_docs.py            # build/docs, with search; a broken link is an error
python scripts/build_docs.py --links    # check links and anchors alone, without mkdocs
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build" / "site-source"
_FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_ELSEWHERE = re.compile(r"^[a-z][a-z+.-]*:")  # https:, mailto:


def first_pages(root: Path) -> list[Path]:
    named = [root / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*named, *sorted((root / "docs").rglob("*.md"))]


def links(page: Path) -> Iterator[str]:
    """Addresses of a page's links and images; what stands in code is none."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    yield from _LINK.findall(_CODE.sub(lambda code: "x" * len(code[0]), text))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings on which GitHub and mkdocs agree: mkdocs makes one dash of several."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in _HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        anchor = re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words).strip().lower())
        if "--" not in anchor:
            found.add(anchor)
    return found


def target_of(page: Path, link: str) -> tuple[Path, str] | None:
    """(file, anchor) that a link leads to; None where it leads out of the repository's files."""
    if _ELSEWHERE.match(link):
        return None
    path, _, anchor = unquote(link).partition("#")
    return ((page.parent / path).resolve() if path else page), anchor


def reachable(root: Path) -> tuple[list[Path], list[str]]:
    """Every file that the site holds, found along the links, and a line for each link that leads nowhere."""
    root = root.resolve()
    waiting = [page.resolve() for page in first_pages(root)]
    found: dict[Path, None] = dict.fromkeys(waiting)
    broken = []
    while waiting:
        page = waiting.pop(0)
        name = page.relative_to(root).as_posix()
        for link in links(page):
            where = target_of(page, link)
            if where is None:
                continue
            path, anchor = where
            if not path.is_relative_to(root) or not path.exists():
                broken.append(f"{name}: {link} does not exist")
            elif path.is_dir():
                broken.append(f"{name}: {link} is a folder, which a site cannot show: name a file in it")
            elif anchor and path.suffix == ".md" and anchor not in anchors(path):
                broken.append(f"{name}: {link}: {path.name} has no such heading")
            elif path not in found:
                found[path] = None
                if path.suffix == ".md":
                    waiting.append(path)
    return list(found), broken


def lay_out(files: list[Path], target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for path in files:
        place = target / path.relative_to(ROOT.resolve())
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)


def main() -> int:
    files, broken = reachable(ROOT)
    for line in broken:
        print(line)
    if broken or "--links" in sys.argv[1:]:
        print(f"{len(files)} files, {len(broken)} broken links")
        return 1 if broken else 0
    lay_out(files, SOURCE)
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--clean",
        "--quiet",
        "-f",
        str(ROOT / "mkdocs.yml"),
    ]
    # The theme advertises its successor otherwise; what is wrong with the pages is still printed.
    code = subprocess.run(command, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode
    if code == 0:
        print("build/docs/index.html; browsers run the search from a server alone: python -m http.server -d build/docs")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
