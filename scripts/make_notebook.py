"""Write docs/start/t4.ipynb from the cells below, so that a change to it is read as text.

python scripts/make_notebook.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "docs" / "start" / "t4.ipynb"

CELLS = [
    (
        "markdown",
        """
# Distil on one T4

Choose a runtime with a GPU: Kaggle *Settings > Accelerator > GPU T4*, Colab *Runtime > Change runtime type*. Without a
GPU the same cells run on the CPU with small settings. Models and text are those of the package; put yours into the
third cell. The guide is `docs/guides/t4.md`.
""",
    ),
    (
        "code",
        """
# Install, where it is not installed yet. SOURCE is a folder, a wheel or the address of the repository.
import importlib.util

SOURCE = "stillroom"
if importlib.util.find_spec("stillroom") is None:
    !pip install --quiet {SOURCE}
!stillroom --version
""",
    ),
    (
        "code",
        """
# The card, and what it can do.
import torch

has_card = torch.cuda.is_available()
if has_card:
    card = torch.cuda.get_device_properties(0)
    print(f"{card.name}, {card.total_memory / 1e9:.1f} GB, capability {card.major}.{card.minor}")
else:
    print("no card: small settings on the CPU")
""",
    ),
    (
        "code",
        """
# What to train. Any of these names may be a folder, a hub id or a file of yours.
from pathlib import Path

TEACHER, STUDENT, DATA = "builtin:teacher", "builtin:student", "builtin:stdlib"
STEPS, MINUTES = (600, 500) if has_card else (12, 10)
Path("run.toml").write_text(f\"\"\"
[teacher]
model = "{TEACHER}"
[student]
model = "{STUDENT}"
[data]
train = "{DATA}"
train_share = {0.05 if has_card else 0.01}
max_length = {128 if has_card else 64}
[train]
max_steps = {STEPS}
batch_size = 8
learning_rate = 4e-3
[eval]
max_batches = {32 if has_card else 2}
samples = {3 if has_card else 1}
sample_tokens = {48 if has_card else 8}
\"\"\")
""",
    ),
    ("markdown", "Plan before anything is loaded, for the card of this page whether or not it is here."),
    ("code", "# Memory by part, and what makes it fit.\n!stillroom plan run.toml --card T4 --quick"),
    ("markdown", "Five real steps with evaluation, save and report. What fails later mostly fails here."),
    ("code", "# The whole path, briefly.\n!stillroom distill run.toml --dry-run --out runs/try --no-progress"),
    (
        "markdown",
        """
The run itself. It stops by itself before the session does, with everything saved; in the next session copy its folder
back and call the same cell again.
""",
    ),
    (
        "code",
        """
# Train, or go on where the folder holds an unfinished run.
import stillroom
from stillroom.core.errors import Interrupted

try:
    result = stillroom.distill(
        stillroom.load_config("run.toml", overrides={"train.max_minutes": MINUTES}), out="runs/t4"
    )
except Interrupted as end:
    print(end)
else:
    print(result)
""",
    ),
    ("markdown", "What came of it: the report is one file that works offline; the table has teacher and student."),
    (
        "code",
        """
# Figures and findings.
for name in ("teacher", "student_before", "student"):
    row = result.summary[name]
    print(f"{name:>15}  perplexity {row['perplexity']:8.1f}  bits per byte {row['bits_per_byte']:.2f}")
print(result.report_path)
!stillroom diagnose runs/t4
""",
    ),
    (
        "code",
        """
# Let it write, and take it away: a Hugging Face folder with a model card, read back and compared.
!stillroom generate runs/t4 --prompt "def main(" --max-new-tokens 24
!stillroom export runs/t4 --out exported/t4
""",
    ),
    (
        "markdown",
        """
Never run on a real card by us. `python scripts/gpu_report.py --json report.json` in a clone of the repository writes
what we would like to know from yours; see `docs/results/gpu.md`.
""",
    ),
]


def lines(text: str) -> list[str]:
    return text.strip("\n").splitlines(keepends=True)


def notebook() -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(CELLS):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines(text)}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"accelerator": "GPU", "kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def text() -> str:
    return json.dumps(notebook(), indent=1) + "\n"


def main() -> None:
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(text(), encoding="utf-8")
    print(PATH)


if __name__ == "__main__":
    main()
