"""The report in a real browser: figures are drawn, and nothing is refused, thrown or fetched."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from synthetic import write_run

from stillroom.report import write_report

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)"),
]

HOSTILE = (
    "<a href='https://evil.example/'>x</a></script><script>document.title='owned'</script>"
    "<img src=x onerror=\"document.title='owned'\">"
)


def visit(path: Path, profile: Path) -> tuple[str, list[str]]:
    """The page's elements after its scripts ran, and every message on the browser's console."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0"]
    command += ["--virtual-time-budget=10000", "--dump-dom", path.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout, re.findall(r":CONSOLE[:(]\d+\)?\] (.*)", done.stderr)


def without_scripts(elements: str) -> str:
    return re.sub(r"<script\b.*?</script>", "", elements, flags=re.DOTALL)


@pytest.mark.parametrize("kind", ["finished", "crashed", "hostile"])
def test_every_figure_is_drawn_and_the_console_stays_empty(kind: str, tmp_path: Path) -> None:
    until = 30 if kind == "crashed" else None
    name = HOSTILE if kind == "hostile" else None
    run = write_run(tmp_path / "run", num_steps=60, until=until, name=name)
    elements, messages = visit(write_report(run), tmp_path / "profile")
    assert messages == []
    drawn = without_scripts(elements)
    for key in (
        "perplexity",
        "objective",
        "shares",
        "raw",
        "weighted",
        "pulls",
        "gradients",
        "rates",
        "pace",
        "verdicts",
    ):
        assert re.search(rf'<div[^>]*id="figure-{key}"[^>]*class="[^"]*js-plotly-plot', drawn), key
    assert len(re.findall(r'<svg class="main-svg"', drawn)) >= 6
    assert len(re.findall(r'<path class="js-line"', drawn)) >= 10
    assert "<title>owned" not in drawn
    assert "<img" not in drawn
    assert "<a " not in drawn


def test_a_run_without_steps_has_a_page_without_scripts(tmp_path: Path) -> None:
    elements, messages = visit(write_report(tmp_path), tmp_path / "profile")
    assert messages == []
    assert "Nothing of this run" in elements


def test_the_watch_itself_sees_a_refused_script(tmp_path: Path) -> None:
    """The other tests rest on an empty console meaning something."""
    report = write_report(write_run(tmp_path / "run", num_steps=60))
    broken = report.read_text(encoding="utf-8").replace("</main>", "<script>document.title='owned'</script></main>", 1)
    report.write_text(broken, encoding="utf-8")
    elements, messages = visit(report, tmp_path / "profile")
    assert any("Content Security Policy" in message for message in messages)
    assert "<title>owned" not in elements
