"""Which layers a student cut from a real model keeps, and what that is worth before and after a few steps.

python benchmarks/quality/bench_cut.py MODEL_FOLDER DATA_FILE --layers 15

One run of `stillroom distill` for each way of choosing layers, everything else equal: held-out perplexity of the
teacher, of the student right after the cut, and after a few steps, with the seconds that cut and choice took. Results
go to results/cut.json with machine and versions, the table to results/cut.md. A method that is in the file for the same
model, data and settings is not run again; `--draw` only draws.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from stillroom.engine.folder import machine, versions

RESULTS = Path(__file__).parent / "results"
METHODS = ("loss", "influence", "even")
SETTINGS = {
    "data.max_length": 128,
    "train.batch_size": 4,
    "train.learning_rate": 5e-4,
    "eval.max_batches": 8,
    "eval.samples": 0,
    "precision.mode": "fp32",
}

Record = dict[str, Any]


def measure(model: Path, data: Path, method: str, layers: int, steps: int) -> Record:
    """One run through the command line, and what it left in its folder."""
    settings = {
        **SETTINGS,
        "student.init": "shrink",
        "student.shrink.layers": layers,
        "student.shrink.method": method,
        "train.max_steps": steps,
        "train.eval_steps": steps,
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "stillroom", "distill", "--teacher", str(model), "--data", str(data)]
        command += ["--out", str(out), "--no-progress"]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        cut = json.loads((out / "cut.json").read_text(encoding="utf-8"))
    return {
        "method": method,
        "kept": cut["layers"],
        "of": cut["of"],
        "why": cut["why"],
        "cut_seconds": cut["seconds"],
        "cut_cpu_seconds": cut["cpu_seconds"],
        "teacher_perplexity": summary["teacher"]["perplexity"],
        "perplexity_after_cut": summary["student_before"]["perplexity"],
        "perplexity_after_steps": summary["student"]["perplexity"],
        "parameters": [summary["student"]["parameters"], summary["teacher"]["parameters"]],
        "training_seconds": summary["seconds"],
        "skipped": summary["skipped"],
    }


def draw(found: Record) -> str:
    runs = sorted(found["runs"], key=lambda run: METHODS.index(run["method"]))
    steps, first = found["asked"]["steps"], runs[0]
    rows = [
        f"| method | layers kept | CPU seconds | perplexity after the cut | after {steps} steps |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        kept = ", ".join(map(str, run["kept"]))
        rows.append(
            f"| {run['method']} | {kept} | {run['cut_cpu_seconds']:,.0f} | {run['perplexity_after_cut']:,.4g} "
            f"| {run['perplexity_after_steps']:,.4g} |"
        )
    asked, where = found["asked"], found["machine"]
    settings = ", ".join(f"{name} = {value}" for name, value in found["settings"].items())
    return "\n".join(
        [
            "# Layers of a cut student, chosen in three ways",
            "",
            f"`{asked['model']}` ({first['parameters'][1]:,} parameters, {first['of']} layers) cut to "
            f"{asked['layers']} layers ({first['parameters'][0]:,} parameters) and distilled for {steps} steps on "
            f"`{asked['data']}`. "
            f"Held-out perplexity; the teacher's is {first['teacher_perplexity']:,.4g}, guessing is "
            f"{found['vocabulary']:,}.",
            "",
            *rows,
            "",
            "CPU seconds, of all cores together, are those of the choice and the cut. One run each: the choice is "
            "deterministic, the order of the text the same.",
            "",
            f"Settings: {settings}. {where['cores']} cores ({where['processor']}), {where['threads']} threads, torch "
            f"{found['versions']['torch']}, transformers {found['versions']['transformers']}. Drawn from `cut.json` by "
            "`bench_cut.py`.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="folder of a model")
    parser.add_argument("data", type=Path, nargs="?", help="text to choose, train and hold out from")
    parser.add_argument("--name", help="what the model is called in the table; its folder's name without it")
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--draw", action="store_true", help="only draw the table")
    wanted = parser.parse_args()
    path = RESULTS / "cut.json"
    found: Record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not wanted.draw:
        if wanted.model is None or wanted.data is None:
            parser.error("give the folder of a model and a file of text")
        name = wanted.name or wanted.model.name
        asked = {"model": name, "data": wanted.data.name, "layers": wanted.layers, "steps": wanted.steps}
        vocabulary = json.loads((wanted.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        if found.get("asked") != asked or found.get("settings") != SETTINGS:
            found = {"asked": asked, "settings": SETTINGS, "vocabulary": vocabulary, "runs": []}
        for method in wanted.methods.split(","):
            if any(run["method"] == method for run in found["runs"]):
                continue
            found["runs"].append(measure(wanted.model, wanted.data, method, wanted.layers, wanted.steps))
            found["versions"] = versions()
            found["machine"] = {**machine(), "threads": torch.get_num_threads()}
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "cut.md").write_text(draw(found), encoding="utf-8")


if __name__ == "__main__":
    main()
