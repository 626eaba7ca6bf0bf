"""Write results/tables.md from the result files. Nothing in it is typed by hand.

python benchmarks/reliability/tables.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from common import RESULTS


def load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(title: str, heads: list[str], rows: list[list[Any]]) -> str:
    lines = [f"## {title}", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join([*lines, ""])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def faults(found: dict[str, Any]) -> str:
    rows = [
        [r["name"], r["status"], r["loss"], r["gap_percent"], json.dumps(r.get("verdicts", {})), r["passed"]]
        for r in found["runs"]
    ]
    heads = ["fault", "end", "held-out loss", "gap to clean, %", "verdicts", "within the bar"]
    return table("Faults: one at a time (bar 0.3 %), and ten in one run (bar 1 %)", heads, rows)


def parity(found: dict[str, Any]) -> str:
    rows = [
        [r["learning_rate"], r["name"], r["moments"], r["loss"], r["gap_percent"], r["progress"], r["passed"]]
        for r in found["runs"]
    ]
    heads = [
        "learning rate",
        "policy",
        "moments",
        "held-out loss",
        "gap to FP32, %",
        "progress / FP32's",
        "within 0.2 %",
    ]
    return table("Parity of the FP16 policies with FP32", heads, rows)


def bytes_(found: dict[str, Any]) -> str:
    rows = [[r["mode"], r["moments"], r["bytes_per_parameter"], r["bar"], r["passed"]] for r in found["runs"]]
    return table("Training state, measured", ["policy", "moments", "bytes a parameter", "bar", "within"], rows)


def unmoved(found: dict[str, Any]) -> str:
    rows = [[r["name"], 100 * r["unmoved_fraction"], r["passed"]] for r in found["runs"]]
    return table("Weights unmoved after 100 steps at learning rate 5e-6", ["policy", "%", "below 5 %"], rows)


def ultra(found: dict[str, Any]) -> str:
    rows = [[r["name"], r["before"], r["loss"]] for r in found["runs"]]
    rows.append(["share of FP32's improvement", found["share_of_improvement"], found["passed"]])
    return table("The ultra-stable preset on the embedded default", ["precision", "loss before", "loss after"], rows)


def kill(found: dict[str, Any]) -> str:
    rows = [[name, r["trials"], r["kills"], r["exact"]] for name, r in found["points"].items()]
    heads = ["where", "trials", "kills", "bit-exact at the end"]
    return table("SIGKILL, then the same command again", heads, rows)


def clean(found: dict[str, Any]) -> str:
    rows = [[r["seed"], r["steps"], r["skipped"], r["rollbacks"], r["passed"]] for r in found["runs"]]
    return table("False alarms in clean runs", ["seed", "steps", "skipped", "rollbacks", "none"], rows)


def overhead(found: dict[str, Any]) -> str:
    rows = [
        [run["seconds"], run["guard_seconds"], run["ratio"], found["bar"], run["ratio"] <= found["bar"]]
        for run in found["runs"]
    ]
    heads = ["CPU s of 200 steps", "inside the guard", "ratio", "bar", "within"]
    return table("What the guard costs", heads, rows)


def peers(found: dict[str, Any]) -> str:
    rows = []
    for r in found["runs"]:
        ours, theirs = r["stillroom"], r["trl"]
        rows.append(
            [r["fault"], ours["loss"], ours["survived"], theirs["loss"], theirs["last_logged_loss"], theirs["survived"]]
        )
    heads = ["fault", "stillroom: loss", "survived", "trl: loss", "trl: last logged", "survived"]
    return table(f"The same faults in trl {found['trl']}'s GKD trainer (FP32)", heads, rows)


def borders_kills(found: dict[str, Any]) -> str:
    rows = [
        [preset, len(lines), sum(r["kills"] for r in lines), sum(r["is_exact"] for r in lines),
         sum(r["is_consistent"] for r in lines)]
        for preset, lines in _by_preset(found).items()
    ]  # fmt: skip
    heads = ["preset", "runs", "kills", "bit-exact at the end", "the same log of losses"]
    return table("SIGKILL after a random time, over all presets and precisions", heads, rows)


def borders_faults(found: dict[str, Any]) -> str:
    rows = [
        [r["preset"], r["precision"], r["inject"].replace(",", " "), r["code"], r.get("rollbacks"), r.get("skipped"),
         r.get("before"), r.get("after"), r["is_good"]]
        for r in found["lines"]
    ]  # fmt: skip
    heads = ["preset", "precision", "faults", "exit code", "rollbacks", "skipped", "perplexity before", "after", "good"]
    title = "Sequences of faults in the first, the eleventh and the last step, in evaluations and after rollbacks"
    return table(title, heads, rows)


def _by_preset(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    names = dict.fromkeys(line["preset"] for line in found["lines"])
    return {name: [line for line in found["lines"] if line["preset"] == name] for name in names}


PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "faults": faults,
    "parity": parity,
    "bytes": bytes_,
    "unmoved": unmoved,
    "ultra": ultra,
    "kill": kill,
    "clean": clean,
    "overhead": overhead,
    "peers": peers,
    "borders_kills": borders_kills,
    "borders_faults": borders_faults,
}


def main() -> None:
    texts = [
        "# Reliability, measured",
        "",
        "Generated by `benchmarks/reliability/tables.py` from the files beside it.",
        "",
    ]
    for name, write in PARTS.items():
        found = load(name)
        texts.append(write(found) if found else f"## {name}\n\nnot measured yet\n")
    path = RESULTS / "tables.md"
    path.write_text("\n".join(texts))
    print(path)


if __name__ == "__main__":
    main()
