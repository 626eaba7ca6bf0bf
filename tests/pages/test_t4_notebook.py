"""The notebook for one T4 runs from its first cell to its last; here on a CPU, with its own small settings."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
make_notebook: Any = importlib.import_module("make_notebook")
NOTEBOOK = json.loads(make_notebook.PATH.read_text(encoding="utf-8"))


def test_the_notebook_is_current() -> None:
    assert make_notebook.PATH.read_text(encoding="utf-8") == make_notebook.text(), "python scripts/make_notebook.py"


def test_the_notebook_has_the_form_that_readers_of_notebooks_ask_for() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(names) == len(set(names)) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in names)
    for cell in NOTEBOOK["cells"]:
        assert cell["cell_type"] in ("markdown", "code") and cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


def with_shell_lines(source: str) -> str:
    """Python for a cell: a line that begins with ! is a command, with names in braces, as in IPython."""
    return re.sub(r"^(\s*)!(.*)$", lambda line: f"{line[1]}shell(f{line[2]!r})", source, flags=re.MULTILINE)


def test_every_cell_runs_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def shell(line: str) -> None:
        words = shlex.split(line)
        assert words[0] == "stillroom", f"the package is there, and {line} is not needed"
        shown.append(commands.output(capsys, *words[1:]))

    shown: list[str] = []
    pages: list[dict[str, str]] = []
    notebook = SimpleNamespace(display=lambda picture, *, raw: pages.append(picture))
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)  # IPython is no dependency
    names: dict[str, Any] = {"__name__": "notebook", "shell": shell}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            exec(compile(with_shell_lines("".join(cell["source"])), cell["id"], "exec"), names)
    assert names["has_gpu"] is False
    (page,) = pages
    assert "srcdoc=" in page["text/html"] and "<script" not in page["text/html"], "the page is escaped in its frame"
    summary = names["result"].summary
    assert summary["status"] == "done" and summary["steps"] == names["STEPS"]
    assert summary["student"]["perplexity"] < summary["student_before"]["perplexity"]
    assert (tmp_path / "exported" / "t4" / "model.safetensors").is_file()
    assert len(shown) == 8


def test_a_run_that_stops_in_time_leaves_no_cell_without_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens on a T4 whose session is shorter than the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stillroom.telemetry.console.is_notebook", lambda: True)
    monkeypatch.setattr("stillroom.telemetry.console.UpdatedDisplay.show", lambda *_shown: None)
    names: dict[str, Any] = {"__name__": "notebook", "shell": lambda _line: None}
    for cell in NOTEBOOK["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            if "stillroom.distill(" in source:
                names["MINUTES"] = 1e-4
            exec(compile(with_shell_lines(source), cell["id"], "exec"), names)
    assert names["result"].summary["status"] == "interrupted"
