"""Recipes in a folder of their own, with tiny models where the seeds' commands look for theirs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import recipe_runs
import tiny


@pytest.fixture(scope="session")
def kitchen(tmp_path_factory: pytest.TempPathFactory, world: Path) -> Path:
    """A copy of the recipes, with a teacher and questions under the names of the QuantumBench seed."""
    folder = tmp_path_factory.mktemp("kitchen") / "recipes"
    shutil.copytree(recipe_runs.RECIPES, folder, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    shutil.copytree(world / "teacher", folder / "models" / "teacher-model")
    (folder / "data").mkdir()
    rows = [{"question": line[: len(line) // 2], "answer": line[len(line) // 2 :]} for line in tiny.sentences(60, 3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "data" / "quantumbench.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture
def stand_ins(kitchen: Path, world: Path, moe_world: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Choose what stands in for the models of a script, and make its run short."""
    monkeypatch.chdir(kitchen)
    monkeypatch.setenv("STILLROOM_RECIPE_SET", recipe_runs.SMALL)

    def choose(script: str) -> None:
        models = moe_world if "sar" in script or "ultra" in script else world
        for role, name in (("TEACHER", "teacher"), ("STUDENT", "student"), ("DATA", "train.jsonl")):
            monkeypatch.setenv(f"STILLROOM_RECIPE_{role}", str(models / name))

    return choose


@pytest.fixture
def recipe(kitchen: Path, stand_ins: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> recipe_runs.Recipe:
    """Run a script of the recipes in this process: `recipe("train.py", "--config", ...)`."""

    def run(script: str, *words: str) -> recipe_runs.Ended:
        stand_ins(script)
        runs = kitchen / "runs"
        before = set(runs.glob("*"))
        code = recipe_runs.main_of(script)(list(words))
        made = sorted(set(runs.glob("*")) - before)
        folder = runs / f"{len(before)}-{Path(script).stem}"
        if made:
            made[-1].rename(folder)  # two runs within a second would have one name
        captured = capsys.readouterr()
        return recipe_runs.Ended(code, captured.out, captured.err, folder)

    return run
