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
# Distil on a T4

Choose a runtime with a GPU: Kaggle *Settings > Accelerator > GPU T4 x2*, Colab *Runtime > Change runtime type*. With
one or two GPUs this notebook distils SmolLM2-360M-Instruct into SmolLM2-135M-Instruct on a part of TinyStories, which
takes a network. Without a GPU the same cells run on the CPU in a minute, with the models and the text of the package.
Put your own names into the third code cell. The guide is `docs/guides/t4.md`.
""",
    ),
    (
        "code",
        """
# Install from a wheel that you uploaded next to this notebook or as a Kaggle dataset (`make dist` in a clone builds
# it), else from the repository.
import glob
import importlib.util

if importlib.util.find_spec("stillroom") is None:
    wheels = glob.glob("stillroom-*.whl") + glob.glob("/kaggle/input/**/stillroom-*.whl", recursive=True)
    source = wheels[0] if wheels else "git+https://github.com/stillroom-ml/stillroom"
    !pip install --quiet {source}
!stillroom --version
""",
    ),
    (
        "code",
        """
# The GPU, and what it can do.
import torch

has_gpu, num_gpus = torch.cuda.is_available(), torch.cuda.device_count()
for number in range(num_gpus):
    gpu = torch.cuda.get_device_properties(number)
    print(f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB, capability {gpu.major}.{gpu.minor}")
if not has_gpu:
    print("no GPU: the models of the package, and small settings, on the CPU")
!stillroom selftest --only kernels
""",
    ),
    (
        "code",
        """
# What to train. A name may be a folder, a Hub id or a file of yours; delete max_records to read all of your data.
from pathlib import Path

if has_gpu:
    TEACHER, STUDENT = "HuggingFaceTB/SmolLM2-360M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"
    DATA, STEPS, MINUTES = "hf:roneneldan/TinyStories", 300, 500
    data = "max_records = 8000\\nmax_length = 512"
    train = "batch_size = 8\\ngradient_accumulation_steps = 2"
    evaluation = "max_batches = 32"
else:
    TEACHER, STUDENT, DATA, STEPS, MINUTES = "builtin:teacher", "builtin:student", "builtin:stdlib", 12, 10
    data = "train_share = 0.01\\nmax_length = 64"
    train = "batch_size = 8\\nlearning_rate = 4e-3"
    evaluation = "max_batches = 2\\nsamples = 1\\nsample_tokens = 8"
_ = Path("run.toml").write_text(f\"\"\"
preset = "base"
[teacher]
model = "{TEACHER}"
[student]
model = "{STUDENT}"
[data]
train = "{DATA}"
{data}
[train]
max_steps = {STEPS}
{train}
[eval]
{evaluation}
\"\"\")
""",
    ),
    ("markdown", "Plan before anything is loaded, for a T4 whether or not there is one here."),
    ("code", "# Memory by part, and what makes it fit.\n!stillroom plan run.toml --gpu T4 --quick"),
    (
        "markdown",
        "Measure the GPU: what it reaches, and how far the package's predictions are off. They were made without a "
        "GPU: please paste the block that this prints into an issue.",
    ),
    (
        "code",
        """
# A few minutes on a GPU; on a CPU its rates alone.
part = "" if torch.cuda.is_available() else "--part constants"
!stillroom bench {part} --out bench.json
""",
    ),
    ("markdown", "Five real steps with evaluation, save and report. What fails later mostly fails here."),
    ("code", "# The whole path, briefly.\n!stillroom distill run.toml --dry-run --out runs/try --no-progress"),
    (
        "markdown",
        """
The run. It stops before the session does, with everything saved. In the next session copy its folder back and call the
same cell again.
""",
    ),
    (
        "code",
        """
# Train, or continue where the folder holds an unfinished run. The square that stops a cell saves, too.
import stillroom

if num_gpus > 1:  # one process for each
    !torchrun --nproc-per-node {num_gpus} -m stillroom distill run.toml --max-minutes {MINUTES} --out runs/t4
    result = stillroom.resume("runs/t4", progress=False) if Path("runs/t4/summary.json").exists() else None
else:
    config = stillroom.load_config("run.toml", overrides={"train.max_minutes": MINUTES})
    result = stillroom.distill(config, out="runs/t4")
result
""",
    ),
    (
        "markdown",
        "The result: the report is one file that works offline. A run that stopped in time has the status "
        "`interrupted`: call the cell above again in the next session.",
    ),
    (
        "code",
        """
# Figures and findings.
if result is None or result.summary["status"] == "interrupted":
    print("the run is not finished: the report so far is runs/t4/report.html")
else:
    for name in ("teacher", "student_before", "student"):
        row = result.summary[name]
        print(f"{name:>15}  perplexity {row['perplexity']:8.1f}  bits per byte {row['bits_per_byte']:.2f}")
    result.show_report()
!stillroom diagnose runs/t4
""",
    ),
    (
        "code",
        """
# Let it write, and export it: a Hugging Face folder with a model card, read back and compared.
!stillroom generate runs/t4 --prompt "Once upon a time" --max-new-tokens 24
!stillroom export runs/t4 --out exported/t4

PUSH_TO = ""  # "you/name" sends it to the Hugging Face Hub: put a token that may write into HF_TOKEN first
if PUSH_TO:
    !stillroom push runs/t4 --to {PUSH_TO} --private
""",
    ),
    (
        "markdown",
        """
Never run on a GPU by us. `stillroom bench`, above, prints what we would like to know from yours: paste its block
into an issue.
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
