"""Count what `stillroom distill run.toml` walks through before its first optimizer step.

Prints the functions, the files, how often the walk changes from one file to another, and how deep it goes; with
`--files` the files in the order in which they are entered. Functions that only run while modules are imported do not
count. Use `make .venv/.stamp` first, then `.venv/bin/python scripts/walk.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src" / "stillroom"
RUN = """
preset = "base"
[teacher]
model = "builtin:teacher"
[student]
model = "builtin:student"
[data]
train = "builtin:qa"
[train]
max_steps = 2
batch_size = 2
[eval]
max_batches = 1  # the walk is the same for many, and a traced evaluation is slow
"""


class Arrived(BaseException):
    """Ends the walk at the first step of the optimizer."""


class Walk:
    """A profile function that follows calls of the package's own code in the main thread."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.files: dict[str, int] = {}
        self.changes = 0
        self.deepest = 0
        self._depth = 0
        self._here = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(str(SOURCE)) or _is_importing(frame):
            return
        self._depth += 1 if event == "call" else -1
        if event != "call":
            return
        name = str(Path(path).relative_to(SOURCE))
        self.deepest = max(self.deepest, self._depth)
        self.functions.add((name, frame.f_code.co_qualname))
        self.files[name] = self.files.get(name, 0) + 1
        self.changes += name != self._here
        self._here = name
        if frame.f_code.co_qualname == "AdamW.step":
            sys.setprofile(None)
            raise Arrived


def _is_importing(frame: FrameType) -> bool:
    """Say whether a module body is being run above this frame, below the command itself."""
    at: FrameType | None = frame
    while at is not None:
        if at.f_code.co_name == "<module>" and at.f_code.co_filename.startswith(str(SOURCE)):
            return True
        at = at.f_back
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="list the files in the order in which they are entered")
    parser.add_argument("--functions", action="store_true", help="list them with the functions that are called")
    wants = parser.parse_args()

    from stillroom.cli import main as command

    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.toml"
        config.write_text(RUN, encoding="utf-8")
        sys.setprofile(walk)
        try:
            command(["distill", str(config), "--out", str(Path(folder) / "run"), "--no-progress", "--device", "cpu"])
        except (Arrived, SystemExit):  # the command turns what it does not know into an exit code
            pass
        finally:
            sys.setprofile(None)
    counts = {
        "functions": len(walk.functions),
        "files": len(walk.files),
        "changes_of_file": walk.changes,
        "depth": walk.deepest,
    }
    print(json.dumps(counts))
    if wants.functions:
        for name in walk.files:
            print(name, *sorted(function for file, function in walk.functions if file == name))
    elif wants.files:
        print("\n".join(walk.files))


if __name__ == "__main__":
    main()
