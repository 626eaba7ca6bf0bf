"""Read the fenced blocks and the commands of README and docs.

A block that is not run has a mark on the line before it, an HTML comment with a reason:

<!-- snippet: needs-gpu because ... -->     a card is needed
<!-- snippet: held-by tests/x/test_y.py -->  another test runs it
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("stillroom", "make", "pip", "python", "git", "cd", "torchrun", "accelerate", "docker", "printf", "mkdir")
SHELL = ("", "bash", "sh", "console", "shell")
MARKS = ("needs-gpu", "held-by")

_BLOCK = re.compile(r"(?:^<!-- snippet: (?P<mark>.*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_INLINE = re.compile(r"`(stillroom [^`]+)`")


@dataclass(frozen=True)
class Snippet:
    page: Path
    line: int  # of the page, where the text begins
    language: str
    text: str
    mark: str  # empty where there is none

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of a block for a shell: comments left out, continued lines joined."""
        if self.language not in SHELL:
            return []
        found = []
        for line in re.sub(r"\\\n\s*", "", self.text).splitlines():
            command = re.sub(r"(^|\s)#\s.*$", "", line.removeprefix("$ ").removeprefix("!")).strip()
            if command.split(" ")[0] in PROGRAMS:
                found.append(command)
        return found


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text(encoding="utf-8")
    return [
        Snippet(
            page, text.count("\n", 0, match.start("text")) + 1, match["language"], match["text"], match["mark"] or ""
        )
        for match in _BLOCK.finditer(text)
    ]


def inline_commands(page: Path) -> Iterator[str]:
    """Commands of stillroom in running text and tables. What stands in brackets may be left out."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    for command in _INLINE.findall(" ".join(text.split())):
        yield command.replace("[", "").replace("]", "")
