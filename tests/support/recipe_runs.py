"""Run the scripts of `recipes/` in this process."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parent.parent.parent / "recipes"
sys.path.append(str(RECIPES))

# Settings that make any recipe a matter of a second.
SMALL = (
    "train.max_steps=3 train.gradient_accumulation_steps=1 data.max_length=32 data.eval_share=0.1 eval.max_batches=2 "
    "eval.samples=1 eval.sample_tokens=4 train.compile=off"
)


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    folder: Path  # of the newest run

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return [event for line in lines if (event := json.loads(line))["event"] == name]

    def config(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "config.json").read_bytes())["config"][section]
        return found


Recipe = Callable[..., Ended]


def main_of(script: str) -> Callable[[Sequence[str]], int]:
    """The `main` of a script. Loaded under a name of its own: `train` and `scripts` are not names to leave behind."""
    spec = importlib.util.spec_from_file_location(f"recipe_{Path(script).stem}", RECIPES / script)
    assert spec is not None and spec.loader is not None
    path = list(sys.path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    main: Callable[[Sequence[str]], int] = module.main
    return main


def shell_environment(**over: str) -> dict[str, str]:
    """The environment of a shell whose `python` is this one, without stand-ins."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("STILLROOM_RECIPE_")}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **over}
