"""Which layers a student cut from a real model keeps, and what that is worth before and after a few steps.

python benchmarks/quality/bench_cut.py MODEL_FOLDER DATA_FILE --layers 15 --distill loss

Each way of choosing layers cuts the same model: the layers kept, the CPU seconds of choice and cut, and the held-out
perplexity right after it. The methods named with --distill are then trained for a few steps by `stillroom distill`.
Results go to results/cut.json with machine and versions as they come, the table to results/cut.md; what is in the file
for the same model, data and settings is not measured again. `--chosen METHOD=CUT_JSON` takes a choice from the cut.json
of a run with the same data and settings instead of making it again; `--draw` only draws.

python benchmarks/quality/bench_cut.py --rounds

compares, on the embedded teacher and text, cuts in one, two and three rounds at equal steps: to so many layers, and to
as many parameters in depth and width (`student.shrink.to`). Every arm takes the better of two learning rates on its
first seed. Results go to results/cut_rounds.json and .md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from stillroom.config import load_config
from stillroom.config.schema import DataConfig, ShrinkConfig, TeacherConfig
from stillroom.data import fixed_batches, open_data
from stillroom.models.load import load_teacher, load_tokenizer
from stillroom.models.shrink.cut import cut
from stillroom.models.shrink.layer_choice import Choice, mean_loss, num_scored, passages
from stillroom.models.shrink.width import CALIBRATION_BATCHES
from stillroom.training.distill import distill
from stillroom.training.run_folder import machine, versions

RESULTS = Path(__file__).parent / "results"
METHODS = ("loss", "influence", "even")
LENGTH, BATCH = 128, 4
HELD_OUT_TOKENS = 4096
SETTINGS = {
    "data.max_length": LENGTH,
    "train.batch_size": BATCH,
    "train.learning_rate": 5e-4,
    "eval.max_batches": 8,
    "eval.samples": 0,
    "precision.mode": "fp32",
}

Record = dict[str, Any]


class Cutter:
    """The teacher and the text, loaded once."""

    def __init__(self, model: Path, data: Path) -> None:
        section = TeacherConfig(model=str(model))
        corpus = open_data(DataConfig(train=str(data), max_length=LENGTH), load_tokenizer(section, section.model))
        self.teacher = load_teacher(section, torch.float32)[0]
        self.batches = list(fixed_batches(corpus.train, BATCH, CALIBRATION_BATCHES))
        held_out = fixed_batches(corpus.evaluation, BATCH, 2 * HELD_OUT_TOKENS // (BATCH * LENGTH))
        self.held_out = passages(held_out, HELD_OUT_TOKENS, torch.device("cpu"))

    def facts(self) -> Record:
        return {
            "vocabulary": int(self.teacher.get_output_embeddings().weight.shape[0]),
            "teacher_perplexity": math.exp(mean_loss(self.teacher, self.held_out)),
            "teacher_parameters": self.teacher.num_parameters(),
            "teacher_layers": int(self.teacher.config.num_hidden_layers),
            "held_out_tokens": num_scored(self.held_out),
        }

    def measure(self, method: Any, layers: int, chosen: Record | None) -> Record:
        choice = Choice(tuple(chosen["layers"]), method, tuple(chosen["why"])) if chosen else None
        began, cpu_began = time.monotonic(), time.process_time()
        found = cut(self.teacher, ShrinkConfig(layers=layers, method=method), self.batches, choice=choice)
        spent = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - cpu_began}
        return {
            "method": method,
            "kept": list(found.kept_layers),
            "why": list(found.choice.why),
            "seconds": chosen["seconds"] if chosen else spent["seconds"],
            "cpu_seconds": chosen["cpu_seconds"] if chosen else spent["cpu_seconds"],
            "parameters": found.model.num_parameters(),
            "perplexity": math.exp(mean_loss(found.model, self.held_out)),
        }


def distilled(model: Path, data: Path, kept: list[int], steps: int) -> Record:
    """A few steps through the command line from these layers, and what the run says of itself."""
    settings = {**SETTINGS, "student.init": "shrink", "student.shrink.layers": kept}
    settings |= {"train.max_steps": steps, "train.eval_steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "stillroom", "distill", "--teacher", str(model), "--data", str(data)]
        command += ["--out", str(out), "--no-progress"]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return {
        "steps": steps,
        "teacher": summary["teacher"]["perplexity"],
        "before": summary["student_before"]["perplexity"],
        "after": summary["student"]["perplexity"],
        "seconds": summary["seconds"],
        "skipped": summary["skipped"],
    }


# -- rounds ----------------------------------------------------------------------------------------------

ROUNDS_LAYERS, ROUNDS_STEPS, ROUNDS_RATES, ROUNDS_SEEDS = 2, 240, (1e-3, 3e-3), (0, 1, 2)
ROUNDS_SETTINGS = {
    "teacher.model": "builtin:teacher",
    "data.train": "builtin:stdlib",
    "data.max_length": 64,
    "train.batch_size": 8,
    "train.max_steps": ROUNDS_STEPS,
    "train.eval_steps": 60,
    "eval.max_batches": 32,
    "eval.samples": 0,
    "precision.mode": "fp32",
    "student.init": "shrink",
    "student.shrink.method": "loss",
}


def recovered(settings: Record) -> Record:
    """A run through `distill`, and its loss right after each cut and at the end, in nats a token."""
    with tempfile.TemporaryDirectory() as name:
        out, began = Path(name) / "run", time.process_time()
        distill(load_config(overrides=settings), out, device="cpu")
        spent = time.process_time() - began
        folders = [*sorted((out / "rounds").glob("*")), out]
        summaries = [json.loads((folder / "summary.json").read_text(encoding="utf-8")) for folder in folders]
        choice = json.loads((out / "cut.json").read_text(encoding="utf-8"))
    return {
        "cpu_seconds": round(spent, 1),
        "steps": sum(summary["steps"] for summary in summaries),
        "parameters": summaries[-1]["student"]["parameters"],
        "cut": [math.log(summary["student_before"]["perplexity"]) for summary in summaries],
        "recovered": [math.log(summary["student"]["perplexity"]) for summary in summaries],
        "teacher": math.log(summaries[-1]["teacher"]["perplexity"]),
        "layers": len(choice["layers"]),
        "sizes": choice.get("sizes", {}),
        "candidates": choice.get("candidates", []),
    }


def sweep_rounds(path: Path) -> None:
    """Fill the file of the rounds; what is in it is not run again."""
    torch.set_num_threads(1)
    found: Record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    asked = {**ROUNDS_SETTINGS, "layers": ROUNDS_LAYERS, "rates": list(ROUNDS_RATES)}
    if found.get("asked") != asked:
        found = {"asked": asked, "runs": []}

    def run(cut: Record, number: int, rate: float, seed: int) -> Record:
        key = {"cut": cut, "rounds": number, "rate": rate, "seed": seed}
        known = next((one for one in found["runs"] if one["key"] == key), None)
        if known is None:
            settings = {**ROUNDS_SETTINGS, **cut, "student.shrink.rounds": number}
            settings |= {"train.learning_rate": rate, "train.seed": seed}
            known = {"key": key, **recovered(settings)}
            found["runs"].append(known)
            found.update(versions=versions(), machine={**machine(), "threads": torch.get_num_threads()})
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(json.dumps({name: known[name] for name in ("key", "cut", "recovered", "cpu_seconds")}), flush=True)
        return known

    def tune(cut: Record, number: int) -> None:
        first = [run(cut, number, rate, ROUNDS_SEEDS[0]) for rate in ROUNDS_RATES]
        rate = min(first, key=lambda one: one["recovered"][-1])["key"]["rate"]
        for seed in ROUNDS_SEEDS[1:]:
            run(cut, number, rate, seed)

    depth = {"student.shrink.layers": ROUNDS_LAYERS}
    for number in (1, 2, 3):
        tune(depth, number)
    size = next(one["parameters"] for one in found["runs"])
    for number in (1, 2):
        tune({"student.shrink.to": str(size)}, number)


def draw_rounds(found: Record) -> str:
    """The table, and the means that pages quote, which are written into `found` too."""
    arms: dict[tuple[str, int], list[Record]] = {}
    for one in found["runs"]:
        arms.setdefault((next(iter(one["key"]["cut"])), one["key"]["rounds"]), []).append(one)
    rows = ["| cut to | rounds | rate | right after the last cut | after recovery | against one round | CPU s |"]
    rows.append("|---|---|---|---|---|---|---|")
    found["means"] = {}
    for (name, number), runs in arms.items():
        rate = min(runs, key=lambda one: (one["key"]["seed"], one["recovered"][-1]))["key"]["rate"]
        lines = {one["key"]["seed"]: one for one in runs if one["key"]["rate"] == rate}
        arm = "layers" if name.endswith("layers") else "parameters"
        found["means"][f"{arm}_{number}"] = mean = {
            "cut": statistics.mean(one["cut"][-1] for one in lines.values()),
            "recovered": statistics.mean(one["recovered"][-1] for one in lines.values()),
            "cpu_seconds": statistics.mean(one["cpu_seconds"] for one in lines.values()),
        }
        against = ""
        if number == 1:
            base = lines
        else:
            gaps = [one["recovered"][-1] - base[seed]["recovered"][-1] for seed, one in lines.items() if seed in base]
            mean["against_one_round"] = statistics.mean(gaps)
            against = f"{statistics.mean(gaps):+.3f} +- {statistics.stdev(gaps):.3f}" if len(gaps) > 1 else ""
        shape = next(iter(lines.values()))
        sizes = ", ".join(f"{key} {value}" for key, value in shape["sizes"].items() if value)
        kept = f"{shape['layers']} layers{', ' + sizes if sizes else ''} ({shape['parameters']:,})"
        rows.append(
            f"| {arm}: {kept} | {number} | {rate:g} | {mean['cut']:.3f} | {mean['recovered']:.3f} | {against} | "
            f"{mean['cpu_seconds']:.0f} |"
        )
    where, first = found["machine"], found["runs"][0]
    parts = [
        "# Cut in one round or in several, in depth alone or in width too",
        f"The embedded teacher (6 layers) and text; held-out loss in nats a token, means over {len(ROUNDS_SEEDS)} "
        f"seeds; the teacher's is {first['teacher']:.3f}. All arms have {ROUNDS_STEPS} steps in total; each took the "
        f"better of the learning rates {', '.join(f'{rate:g}' for rate in ROUNDS_RATES)} on its first seed. "
        "Differences are paired by seed, +- their standard deviation. The rate is chosen on the text that is reported: "
        "it favours no arm, but the losses are slightly low for all.",
        "\n".join(rows),
        f"{where['cores']} cores, one thread, torch {found['versions']['torch']}. Drawn from `cut_rounds.json` by "
        "`bench_cut.py --rounds`.",
    ]
    return "\n\n".join(parts) + "\n"


def rounds() -> None:
    path = RESULTS / "cut_rounds.json"
    sweep_rounds(path)
    found = json.loads(path.read_text(encoding="utf-8"))
    path.with_suffix(".md").write_text(draw_rounds(found), encoding="utf-8")
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


# -- layers ----------------------------------------------------------------------------------------------


def told(perplexity: float) -> str:
    return f"{perplexity:,.0f}" if perplexity >= 100 else f"{perplexity:.2f}"


def draw(found: Record) -> str:
    runs = sorted(found["runs"], key=lambda run: METHODS.index(run["method"]))
    asked, facts, where = found["asked"], found["facts"], found["machine"]
    rows = ["| method | layers kept | CPU seconds | perplexity after the cut |", "|---|---|---|---|"]
    lines = []
    for run in runs:
        kept = ", ".join(map(str, run["kept"]))
        rows.append(f"| {run['method']} | {kept} | {run['cpu_seconds']:,.0f} | {told(run['perplexity'])} |")
        if "distilled" in run:
            trained = run["distilled"]
            lines.append(
                f"Distilled for {trained['steps']} steps from the layers by {run['method']}, the student's perplexity "
                f"on the run's own held-out batches went from {told(trained['before'])} to {told(trained['after'])} "
                f"(teacher {told(trained['teacher'])})."
            )
    settings = ", ".join(f"{name} = {value}" for name, value in found["settings"].items())
    parts = [
        "# Layers of a cut student, chosen in three ways",
        f"`{asked['model']}` ({facts['teacher_parameters']:,} parameters, {facts['teacher_layers']} layers) cut to "
        f"{asked['layers']} layers ({runs[0]['parameters']:,} parameters) by text of `{asked['data']}`. Perplexity on "
        f"{facts['held_out_tokens']:,} held-out tokens of it, before any training; the teacher's is "
        f"{told(facts['teacher_perplexity'])}, guessing is {facts['vocabulary']:,}.",
        "\n".join(rows),
        "CPU seconds, of all cores together, are those of choice and cut. One cut each: the choice is deterministic.",
        *lines,
        f"Settings: {settings}. {where['cores']} cores ({where['processor']}), {where['threads']} threads, torch "
        f"{found['versions']['torch']}, transformers {found['versions']['transformers']}. Drawn from `cut.json` by "
        "`bench_cut.py`.",
    ]
    return "\n\n".join(parts) + "\n"


def save(found: Record) -> None:
    found["versions"] = versions()
    found["machine"] = {**machine(), "threads": torch.get_num_threads()}
    (RESULTS / "cut.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "cut.md").write_text(draw(found), encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="folder of a model")
    parser.add_argument("data", type=Path, nargs="?", help="text to choose by, train on and hold out from")
    parser.add_argument("--name", help="what the model is called in the table; its folder's name without it")
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--distill", default="", help="methods whose cut is trained for --steps steps")
    parser.add_argument("--chosen", action="append", default=[], metavar="METHOD=CUT_JSON")
    parser.add_argument("--draw", action="store_true", help="only draw the table")
    parser.add_argument("--rounds", action="store_true", help="compare cuts in rounds on the embedded models")
    wanted = parser.parse_args()
    if not (wanted.draw or wanted.rounds) and (wanted.model is None or wanted.data is None):
        parser.error("give the folder of a model and a file of text")
    return wanted


def main() -> None:
    wanted = arguments()
    if wanted.rounds:
        rounds()
        return
    path = RESULTS / "cut.json"
    found: Record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if wanted.draw:
        (RESULTS / "cut.md").write_text(draw(found), encoding="utf-8")
        return
    asked = {"model": wanted.name or wanted.model.name, "data": wanted.data.name, "layers": wanted.layers}
    if found.get("asked") != asked or found.get("settings") != SETTINGS:
        found = {"asked": asked, "settings": SETTINGS, "runs": []}
    measured = {run["method"]: run for run in found["runs"]}
    missing = [method for method in wanted.methods.split(",") if method not in measured]
    if missing:
        chosen = dict(pair.split("=", 1) for pair in wanted.chosen)
        cutter = Cutter(wanted.model, wanted.data)
        found["facts"] = cutter.facts()
        for method in missing:
            given = json.loads(Path(chosen[method]).read_text(encoding="utf-8")) if method in chosen else None
            measured[method] = cutter.measure(method, wanted.layers, given)
            found["runs"] = list(measured.values())
            save(found)
    for method in filter(None, wanted.distill.split(",")):
        if "distilled" not in measured[method]:
            measured[method]["distilled"] = distilled(wanted.model, wanted.data, measured[method]["kept"], wanted.steps)
            save(found)


if __name__ == "__main__":
    main()
