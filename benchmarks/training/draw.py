"""Tables and plots of the training benchmarks, drawn from their JSON and from nothing else.

.venv-bench/bin/python benchmarks/training/draw.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _where(result: dict[str, Any]) -> list[str]:
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    busy = ", ".join(result["busy_around"]) or "none"
    return [
        f"{result['date']}; {machine['processor']} ({', '.join(machine['instructions'])}), "
        f"{machine['threads']} threads, {machine['memory_gb']} GB; {versions}. "
        f"Other busy processes before or after: {busy}.",
        "",
    ]


def steps_table(result: dict[str, Any]) -> list[str]:
    lines = [
        "## Seconds a step",
        "",
        *_where(result),
        # A file that does not say was measured with all of them in one process.
        f"{result['size']}, {result['repetitions']} rounds: "
        f"{result.get('how', 'taking turns in one process; seconds are the least of the rounds')}.",
        "",
    ]
    lines += [
        "| loop | wall s | CPU s | tokens/s | x limit | speed against trl (wall) | (CPU) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        lines.append(
            f"| {name} | {row['wall']:.3f} | {row['cpu']:.3f} | {row['tokens_per_second']:,.0f} | "
            f"{row['x_limit']:.2f} | {row['speed_against_trl']:.2f} | {row['speed_against_trl_cpu']:.2f} |"
        )
    return lines


def memory_table(result: dict[str, Any]) -> list[str]:
    lines = ["", "## Peak resident memory of the process", "", *_where(result)]
    lines += ["| loop | peak MB | before the first step | against trl |", "|---|---|---|---|"]
    for name, row in result["rows"].items():
        cells = f"{row['peak'] / 1e6:,.0f} | {row['before_first_step'] / 1e6:,.0f} | {row['against_trl']:.2f}"
        lines.append(f"| {name} | {cells} |")
    return lines


def scaling_table(result: dict[str, Any]) -> list[str]:
    lines = ["", "## Is the cost linear?", "", *_where(result)]
    lines += ["| axis | seconds a step | exponent between the last two points |", "|---|---|---|"]
    for axis, found in result["axes"].items():
        points = ", ".join(f"{point['value']:,}: {point['wall']:.3f}" for point in found["points"])
        lines.append(f"| {axis} | {points} | {found['exponent_at_the_end']:.2f} |")
    return lines


def target_table(result: dict[str, Any]) -> list[str]:
    lines = ["", f"## Seconds of training to a held-out loss of {result['target']:.3f}", "", *_where(result)]
    lines += ["| trainer | wall s | CPU s | loss at the end |", "|---|---|---|---|"]
    for name, spent in result["seconds"].items():
        cells = " | ".join("not reached" if value is None else f"{value:.1f}" for value in spent.values())
        lines.append(f"| {name} | {cells} | {result['curves'][name][-1]['loss']:.4f} |")
    return lines


def cached_target_table(result: dict[str, Any]) -> list[str]:
    lines = target_table(result)
    lines[1] = f"## Seconds to trl's last held-out loss, {result['target']:.3f}, after three passes over the text"
    ratios = {
        clock: result["seconds"]["stillroom, cached"][clock] / result["seconds"]["trl GKD trainer"][clock]
        for clock in ("wall", "cpu")
        if result["seconds"]["stillroom, cached"][clock] is not None
    }
    said = ", ".join(f"{ratio:.2f} of trl's {clock} seconds" for clock, ratio in ratios.items()) or "not reached"
    writing = result["writing"]
    return [*lines, "", f"Bar: 0.40 of trl's, writing the cache included ({writing['wall']:.1f} s wall, "
            f"{writing['cpu']:.1f} s CPU): {said}."]  # fmt: skip


def real_step_table(result: dict[str, Any]) -> list[str]:
    mode = f" in {result['mode'].upper()}" if "mode" in result else ""
    lines = ["", f"## A step at a real size{mode}, {result['threads']} threads", "", *_where(result)]
    order = "taking turns" if result.get("interleaved", True) else "one after the other, not in turns"
    lines += [f"{result['size']}, {result['rounds']} rounds, {order}; medians.", ""]
    lines += [
        "| loop | wall s | x products | speed against trl | CPU s | x products | speed against trl | parts, wall s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        cells = [f"{row[f'{clock}{word}']:.2f}" for clock in ("wall", "cpu")
                 for word in ("", "_x_products", "_speed_against_trl")]  # fmt: skip
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in row["parts"].items())
        lines.append(f"| {name} | {' | '.join(cells)} | {parts} |")
    lines += ["", "Bars: a step at most 1.45 x the products; with stored answers at least 2.5 x trl's speed."]
    if result.get("mode") == "bf16":
        lines[-1] = "Bars in BF16: at most 0.55 of trl's time live, 0.35 with stored answers, 1.25 x the products."
        lines += ["", f"Least CPU seconds (load of the machine at the start: {result['load']:.1f}):", ""]
        for name, row in result["rows"].items():
            against = f"{row['least_cpu_x_trl']:.2f} of trl's, {row['least_cpu_x_products']:.2f} x products"
            lines.append(f"- {name}: {row['least_cpu']:.2f}, {against}")
    return lines


def whole_table(result: dict[str, Any]) -> list[str]:
    lines = ["", f"## 100,000 tokens from nothing to a student, in {result['mode'].upper()}", "", *_where(result)]
    lines += [
        f"{result['size']}, {result['steps_a_pass']} steps a pass; extended from runs of 4 and 12 steps and of three "
        "passes over 4. A later step is one of a second or third pass.",
        "",
        "| loop | start and end, CPU s | a step | a later step | one pass | against trl | three passes | against trl |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["extended"].items():
        cells = [row[f"cpu {word}"] for word in ("of start and end", "a step", "a later step", "of 1")]
        cells += [row["cpu of 1, speed against trl"], row["cpu of 3"], row["cpu of 3, speed against trl"]]
        lines.append(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return [*lines, "", "Bars: 1.8 times trl's speed for one pass, 2.5 for three."]


def epochs_table(result: dict[str, Any]) -> list[str]:
    lines = ["", "## From nothing to a finished student", "", *_where(result)]
    lines += [f"{name}: {size}" for name, size in result["sizes"].items()]
    lines += [
        "",
        "| size | passes | loop | wall s | against trl | CPU s | against trl | steps' wall s | against trl | load |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, run in result["runs"].items():
        size, passes, name = key.split(" / ")
        peer = result["runs"].get(f"{size} / {passes} / trl GKD trainer, forward KL (beta 0)", {})
        cells = [f"{run[clock]:.1f} | {peer[clock] / run[clock]:.2f}" if peer else f"{run[clock]:.1f} | "
                 for clock in ("wall", "cpu", "training_wall")]  # fmt: skip
        lines.append(f"| {size} | {passes} | {name} | {' | '.join(cells)} | {run['load']:.1f} |")
    return [*lines, "", "Bars with stored answers: steps 4.2 (small) and 2.5 (135M to 81M) times trl's speed; three "
            "passes 2.5 and 2 times, writing included."]  # fmt: skip


def plot(results: dict[str, dict[str, Any]]) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "stillroom"  # the same picture every time
    from matplotlib import pyplot

    made = []
    if "scaling" in results:
        axes = results["scaling"]["axes"]
        figure, grid = pyplot.subplots(2, (len(axes) + 1) // 2, figsize=(8, 5), squeeze=False)
        for panel in grid.flat[len(axes) :]:
            panel.set_visible(False)
        for panel, (axis, found) in zip(grid.flat, axes.items(), strict=False):
            panel.plot(
                [p["value"] for p in found["points"]], [p["wall"] for p in found["points"]], "o-", color="#2b6cb0"
            )
            panel.set(xlabel=axis.replace("_", " "), ylabel="seconds a step", ylim=0, xlim=0)
            panel.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        made.append(RESULTS / "scaling.svg")
        figure.savefig(made[-1], metadata={"Date": None})
    if "target" in results:
        figure, panel = pyplot.subplots(figsize=(6, 3))
        for name, points in results["target"]["curves"].items():
            panel.plot([p["wall"] for p in points], [p["loss"] for p in points], "o-", label=name)
        panel.axhline(results["target"]["target"], color="#999999", lw=1)
        panel.set(xlabel="seconds of training", ylabel="held-out cross-entropy")
        panel.legend(frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        made.append(RESULTS / "target.svg")
        figure.savefig(made[-1], metadata={"Date": None})
    return made


def main() -> None:
    tables = {
        "steps": steps_table,
        "memory": memory_table,
        "scaling": scaling_table,
        "target": target_table,
        "target_cached": cached_target_table,
        "real_step_2": real_step_table,
        "real_step_1": real_step_table,
        **{f"real_step_{mode}_{threads}": real_step_table for mode in ("bf16", "fp32") for threads in (2, 1)},
        "real_step_bf16_360M_2": real_step_table,
        "real_step_bf16_360M_1": real_step_table,
        "epochs": epochs_table,
        **{f"whole_{mode}_{threads}": whole_table for mode in ("bf16", "fp32") for threads in (2, 1)},
    }
    results = {name: result for name in tables if (result := _load(name)) is not None}
    lines = ["# Whole training steps", "", "Generated by draw.py from the JSON files beside this one.", ""]
    for name, result in results.items():
        lines += tables[name](result)
    images = plot(results)
    page = "\n".join(lines) + "\n" + "".join(f"\n![{image.stem}]({image.name})\n" for image in images)
    (RESULTS / "training.md").write_text(page)
    print(RESULTS / "training.md")


if __name__ == "__main__":
    main()
