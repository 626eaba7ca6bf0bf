"""The page of the recipes names every script and flag, and a recipe's help loads no torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import recipe_runs

PAGE = (recipe_runs.RECIPES / "README.md").read_text(encoding="utf-8")
SCRIPTS = sorted(
    str(path.relative_to(recipe_runs.RECIPES))
    for path in recipe_runs.RECIPES.rglob("*.py")
    if path.parent.name != "_seed"
)
# Of `stillroom` itself, in the column of equal commands.
OF_STILLROOM = {"--preset", "--teacher", "--student", "--only"}


@pytest.fixture(scope="module")
def helps() -> str:
    """The help of all scripts, each asked for in one process that must not load torch."""
    program = (
        "import recipe_runs, sys\n"
        f"for script in {SCRIPTS}:\n"
        "    try:\n"
        "        recipe_runs.main_of(script)(['--help'])\n"
        "    except SystemExit:\n"
        "        pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parent.parent / "support"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_on_the_page(script: str) -> None:
    assert f"python {script}" in PAGE


def test_every_flag_on_the_page_is_one_of_a_recipe(helps: str) -> None:
    named = {flag.replace("_", "-") for flag in re.findall(r"--[a-z][a-z0-9_-]*", PAGE)}
    known = set(re.findall(r"--[a-z][a-z0-9-]*", helps))
    assert not named - known - OF_STILLROOM


def test_links_of_the_page_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (recipe_runs.RECIPES / target).exists(), target
