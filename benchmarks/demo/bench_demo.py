"""The demo's figures: the search for the baselines' settings, and the demo itself over several seeds.

    python benchmarks/demo/bench_demo.py search     # learning rate and decay of every arm, seed 0
    python benchmarks/demo/bench_demo.py seeds      # the demo as it ships, three seeds
    python benchmarks/demo/bench_demo.py draw       # the README's picture, from the run whose table is next to it

Writes JSON with machine and versions into benchmarks/demo/results. Every arm keeps its best student by held-out
perplexity, so each has early stopping; search and report use the same held-out text for all arms alike.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
# (learning rate, weight decay) tried for each arm; the baselines get the wider search.
TRIED = {
    "distilled": ((8e-3, 0.1), (4e-3, 0.1)),
    "tokens": ((4e-3, 1.0), (8e-3, 1.0), (4e-3, 0.1), (2e-3, 1.0)),
    "compute": ((4e-3, 1.0), (2e-3, 1.0), (4e-3, 2.0), (2e-3, 0.1), (8e-3, 1.0), (8e-3, 2.0)),
}


def one_run(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    from stillroom.config import load_config
    from stillroom.demo import baseline_config, compute_ratio
    from stillroom.training.distill import distill

    config = load_config(preset="demo", overrides={"train.seed": job["seed"], **job.get("set", {})})
    if job["arm"] == "distilled":
        train = {"learning_rate": job["learning_rate"], "weight_decay": job["weight_decay"]}
        config = config.model_copy(update={"train": config.train.model_copy(update=train)})
    else:
        ratio = compute_ratio(job["teacher_parameters"], job["student_parameters"])
        steps = round(config.train.max_steps * (ratio if job["arm"] == "compute" else 1.0))
        config = baseline_config(config, steps, learning_rate=job["learning_rate"], weight_decay=job["weight_decay"])
    folder = Path(tempfile.mkdtemp())
    try:
        summary = distill(config, folder / "run", device="cpu").summary
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    kept = {key: summary[key] for key in ("steps", "best_step", "seconds", "transfer_tokens")}
    line = {**job, **kept, "perplexity": summary["student"]["perplexity"]}
    if "teacher" in summary:
        line["teacher_perplexity"] = summary["teacher"]["perplexity"]
    print(json.dumps(line), flush=True)
    return line


def parameters() -> dict[str, int]:
    from stillroom.config import load_config
    from stillroom.models import anatomy_of
    from stillroom.precision.device import find_device
    from stillroom.training.models import load_models

    models = load_models(load_config(preset="demo"), find_device("cpu"))
    return {
        "teacher_parameters": anatomy_of(models.teacher).num_parameters,
        "student_parameters": anatomy_of(models.student).num_parameters,
    }


def search(over: dict[str, Any], arms: list[str]) -> None:
    sizes = parameters()
    jobs = [
        {"arm": arm, "learning_rate": rate, "weight_decay": decay, "seed": 0, "set": over, **sizes}
        for arm in arms
        for rate, decay in TRIED[arm]
    ]
    known = {_name(line): line for line in _results("search")}
    jobs = [job for job in jobs if _name(job) not in known]
    # Longest first, so that the two workers end together.
    jobs.sort(key=lambda job: ["compute", "distilled", "tokens"].index(job["arm"]))
    with ProcessPoolExecutor(2) as pool:
        known |= {_name(line): line for line in pool.map(one_run, jobs)}
    write("search", {"runs": list(known.values())})


def _name(line: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two runs of the search the same: a search can be widened without repeating it."""
    return line["arm"], line["learning_rate"], line["weight_decay"], line["seed"], str(line["set"])


def _results(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["runs"] if path.exists() else []


def seeds(count: int) -> None:
    from stillroom.config import load_config
    from stillroom.demo import run_demo

    rows = []
    for seed in range(count):
        folder = Path(tempfile.mkdtemp())
        try:
            summary = run_demo(load_config(preset="demo", overrides={"train.seed": seed}), folder / "run").summary
            curve = [
                {"step": event["step"], "perplexity": event["perplexity"]}
                for event in map(json.loads, (folder / "run" / "events.jsonl").read_text().splitlines())
                if event["event"] == "eval"
            ]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps(summary["story"]), flush=True)
        rows.append({"seed": seed, "curve": curve, **summary})
    write("seeds", {"runs": rows})


def write(name: str, value: dict[str, Any]) -> None:
    from stillroom.training.run_folder import machine, versions

    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "versions": versions(), **value}, indent=1) + "\n")
    print(path)


def draw() -> None:
    """Held-out perplexity of the demo's first seed, with the other arms as lines."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    run = json.loads((RESULTS / "seeds.json").read_text())["runs"][0]
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=150)
    points = [point for point in run["curve"] if point["step"] > 0]
    steps, values = [p["step"] for p in points], [p["perplexity"] for p in points]
    axes.plot(steps, values, "o-", color="#1a6b52", lw=2, clip_on=False)
    axes.set_yscale("log")
    lines = [
        ("teacher", run["teacher"]["perplexity"], "#7a4fa3"),
        ("distilled student", run["student"]["perplexity"], "#1a6b52"),
        ("no teacher, equal compute", run["baseline_equal_compute"]["perplexity"], "#b5651d"),
        ("no teacher, equal tokens", run["baseline"]["perplexity"], "#6a6a6a"),
    ]
    right = points[-1]["step"]
    for label, value, colour in lines:
        axes.axhline(value, color=colour, lw=1, ls=":" if label == "distilled student" else "--")
        # The two baselines lie close together: one label above its line, one below.
        place = {"no teacher, equal tokens": "bottom", "no teacher, equal compute": "top"}.get(label, "center")
        text = f"{label}  {value:.1f}"
        axes.annotate(text, (right * 1.02, value), color=colour, va=place, fontsize=9, annotation_clip=False)
    axes.set_xlim(0, right)
    ticks = [15, 20, 30, 50, 100, 200]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("held-out perplexity")
    axes.set_title("The demo's student with and without a teacher, seed 0", loc="left", fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.subplots_adjust(right=0.68)
    target = Path(__file__).parents[2] / "docs" / "images" / "demo.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    # Title is a key that PNG defines; tests/pages/test_readme.py compares the values with the README's table.
    figure.savefig(target, metadata={"Title": " ".join(f"{value:.1f}" for _label, value, _colour in lines)})
    print(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["search", "seeds", "draw"])
    parser.add_argument("--arms", default="compute,distilled,tokens")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="override of the demo preset, a.b=c")
    args = parser.parse_args()
    if args.job == "search":
        from stillroom.config import parse_assignments

        search(parse_assignments(args.set), args.arms.split(","))
    elif args.job == "seeds":
        seeds(args.seeds)
    else:
        draw()


if __name__ == "__main__":
    main()
