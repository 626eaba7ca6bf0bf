"""What a case of the border table is, and how one is run.

A case prepares a hostile or damaged input in a folder of its own and returns the words of a command. The command must
end with the code that the table names, say something that helps, and print no traceback.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny

Words = list[str]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Place:
    """Where a case may build things: a folder of its own, and good parts to copy from."""

    folder: Path
    world: Path  # a teacher, a student and a text that work
    finished: Path  # a run that was done

    def copied(self, part: str, name: str = "") -> Path:
        """A good part of the world copied into the case's folder, to be damaged there."""
        source, target = self.world / part, self.folder / (name or part)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
        return target

    def run(self, *, is_finished: bool = False) -> Path:
        """A copy of the finished run; by default one that looks unfinished, so that resuming has work to do."""
        target = self.folder / "run"
        shutil.copytree(self.finished, target)
        if not is_finished:
            (target / "summary.json").unlink()
        return target

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    def distill(self, *more: str, **over: Any) -> Words:
        """The words of a short run with the given settings changed."""
        words = ["distill", "--out", str(self.folder / "out"), "--device", "cpu", "--no-progress"]
        for key, value in tiny.settings(self.world, **{"train__max_steps": 2, "eval__samples": 0, **over}).items():
            words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
        return [*words, *more]


@dataclass(frozen=True)
class Case:
    """A row of the table: the code a command must end with, and a word that its explanation must hold."""

    name: str
    codes: tuple[int, ...]
    says: str
    prepare: Callable[[Place], Words]


def case(table: list[Case], codes: int | tuple[int, ...], says: str = "") -> Callable[[Callable[[Place], Words]], Any]:
    """Add the decorated function to a table under its own name."""

    def add(prepare: Callable[[Place], Words]) -> Callable[[Place], Words]:
        table.append(Case(prepare.__name__, codes if isinstance(codes, tuple) else (codes,), says, prepare))
        return prepare

    return add


def add_each(
    table: list[Case],
    codes: int | tuple[int, ...],
    rows: dict[str, Any],
    prepare: Callable[[Place, Any], Words],
    says: str = "",
) -> None:
    """Add one case for each named value."""
    for name, value in rows.items():
        expected = codes if isinstance(codes, tuple) else (codes,)
        table.append(Case(name, expected, says, lambda place, value=value: prepare(place, value)))
