"""Walk the tutorial's path from a clone to a chat with an exported student on text of one's own, and time each step.

python benchmarks/newcomer/bench_newcomer.py [--pause SECONDS]    # writes results/newcomer.json

Run it on an idle machine: a step's wall time beside other processes says nothing. The clone is a local one and packages
come from pip's index or cache, so the network's part is in `install` alone. `--pause` is the reading time of a person
between two steps; it is not waited for, only added to `minutes_with_reading`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "head"))
RESULT = Path(__file__).parent / "results" / "newcomer.json"
NOTES = (
    "import json, pathlib\n"
    "pages = sorted(pathlib.Path('docs').rglob('*.md'))\n"
    "lines = [json.dumps({'text': page.read_text()}) for page in pages]\n"
    "pathlib.Path('my-text').mkdir()\n"
    "pathlib.Path('my-text/notes.jsonl').write_text(chr(10).join(lines) + chr(10))\n"
)
STEPS = [
    ("look at the machine", "stillroom doctor --quick"),
    ("distil the embedded default", "stillroom distill --preset demo --max-steps 200 --out runs/first --no-progress"),
    ("let it write", 'stillroom generate runs/first --prompt "def main(" --max-new-tokens 40'),
    ("look at own text", "stillroom data my-text/notes.jsonl --model builtin:teacher --rows 2"),
    ("plan", "stillroom plan mine.toml"),
    ("dry run", "stillroom distill mine.toml --dry-run --out runs/try --no-progress"),
    ("distil on own text", "stillroom distill mine.toml --out runs/mine --no-progress"),
    ("export", "stillroom export runs/mine --out exported/mine"),
    ("chat", "echo 'what is a teacher?' | stillroom chat exported/mine --against builtin:teacher"),
]


def configuration(page: str) -> str:
    """The file that the tutorial has its reader write."""
    found = re.search(r"```toml\n(# mine\.toml\n.*?)```", page, re.DOTALL)
    if found is None:
        raise SystemExit("docs/start/tutorial.md has no block that begins with # mine.toml")
    return found[1]


def timed(name: str, command: str, folder: Path, path: str) -> dict[str, object]:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        command, shell=True, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    shown = command.replace(sys.executable, "python").replace(str(ROOT), "REPOSITORY")
    line = {"step": name, "command": shown, "wall": round(wall, 1), "cpu": round(cpu, 1), "load": os.getloadavg()[0]}
    print(json.dumps(line), flush=True)
    return line


def walk(place: Path) -> list[dict[str, object]]:
    path = os.environ["PATH"]
    steps = [timed("clone", f"git clone -q {ROOT} stillroom", place, path)]
    clone = place / "stillroom"
    install = f"{sys.executable} -m venv .venv && .venv/bin/pip install -q -c constraints.txt ."
    steps.append(timed("install", install, clone, path))
    path = f"{clone / '.venv' / 'bin'}:{path}"
    (clone / "mine.toml").write_text(
        configuration((clone / "docs" / "start" / "tutorial.md").read_text(encoding="utf-8"))
    )
    subprocess.run([sys.executable, "-c", NOTES], cwd=clone, check=True)
    return steps + [timed(name, command, clone, path) for name, command in STEPS]


def main() -> None:
    from measure import machine

    parser = argparse.ArgumentParser()
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of reading between two steps, to be added up")
    pause = parser.parse_args().pause
    where = machine()
    with tempfile.TemporaryDirectory() as place:
        steps = walk(Path(place))
    wall = sum(float(str(step["wall"])) for step in steps)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": where,
        "steps": steps,
        "wall_seconds": round(wall, 1),
        "minutes_with_reading": round((wall + pause * len(steps)) / 60, 1),
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{wall / 60:.1f} minutes of waiting: {RESULT}")


if __name__ == "__main__":
    main()
