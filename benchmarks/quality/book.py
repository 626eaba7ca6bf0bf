"""What was run and what came out: a JSON file that grows run by run, and the tables and figures drawn from it.

A run that is in the book is not repeated, so a sweep can be interrupted and widened. Every arm is tuned by one rule:
three learning rates a factor of three apart on one seed, chosen by dev, then further seeds at that rate. Nothing in a
table is typed: it is computed from the file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lab

RESULTS = Path(__file__).parent / "results"
SEEDS = (0, 1, 2)
RATES = (3e-3, 1e-2, 3e-2)

Line = dict[str, Any]


class Book:
    """The runs of one question."""

    def __init__(self, name: str, folder: Path = RESULTS) -> None:
        self.name = name
        self.folder = folder
        self.path = folder / f"{name}.json"
        held = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.facts: dict[str, Any] = held.get("facts", {})
        self.runs: list[Line] = held.get("runs", [])

    def run(self, arm: str, job: lab.Job, work: Callable[[lab.Job], Line] = lab.run, **labels: Any) -> Line:
        """The line of an arm's job, from the book or by running it."""
        described = json.loads(json.dumps(asdict(job)))
        for line in self.runs:
            if line["arm"] == arm and line["job"] == described and all(line[key] == labels[key] for key in labels):
                return line
        line = {"arm": arm, **labels, "job": described, **_finite(work(job))}
        shown = {key: line[key] for key in ("arm", *labels, "dev", "test", "cpu_seconds")}
        print(json.dumps({**shown, "rate": job.learning_rate, "seed": job.seed}), flush=True)
        self.runs.append(line)
        self.write()
        return line

    def fact(self, name: str, find: Callable[[], Any]) -> Any:
        """Something measured once and used by later runs."""
        if name not in self.facts:
            self.facts[name] = find()
            self.write()
        return self.facts[name]

    def write(self) -> None:
        from stillroom.training.run_folder import machine, versions

        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine(), "versions": versions(), "facts": self.facts, "runs": self.runs}
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(content, indent=1) + "\n")
        draft.replace(self.path)

    # -- tuning ------------------------------------------------------------------------------------------

    def tuned(
        self,
        arm: str,
        make: Callable[[float, int], lab.Job],
        *,
        seeds: Sequence[int] = SEEDS,
        rates: Sequence[float] = RATES,
        work: Callable[[lab.Job], Line] = lab.run,
        **labels: Any,
    ) -> None:
        """Choose an arm's learning rate on its first seed, then run the other seeds with it."""
        grid = {rate: self.run(arm, make(rate, seeds[0]), work, **labels) for rate in rates}
        best = min(grid, key=lambda rate: _dev(grid[rate]))
        for seed in seeds[1:]:
            self.run(arm, make(best, seed), work, **labels)

    # -- reading -----------------------------------------------------------------------------------------

    def lines(self, arm: str, **labels: Any) -> dict[int, Line]:
        """The reported runs of an arm by seed: those at the rate that was best on dev with the first seed."""
        found = [
            line for line in self.runs if line["arm"] == arm and all(line.get(key) == labels[key] for key in labels)
        ]
        grid = [line for line in found if line["job"]["seed"] == 0]
        if not grid:
            return {}
        rate = min(grid, key=_dev)["job"]["learning_rate"]
        return {line["job"]["seed"]: line for line in found if line["job"]["learning_rate"] == rate}

    def values(self, arm: str, what: str = "test", **labels: Any) -> dict[int, float]:
        return {seed: line[what] for seed, line in self.lines(arm, **labels).items() if line[what] is not None}


def _dev(line: Line) -> float:
    return line["dev"] if line["dev"] is not None else math.inf


def _finite(line: Line) -> Line:
    """Strict JSON has no NaN: a value that is not finite is null, and the table says so."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
    }


# -- arithmetic ------------------------------------------------------------------------------------------


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(list(values))


def spread(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.stdev(found) if len(found) > 1 else 0.0


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """one - other, seed by seed."""
    return [one[seed] - other[seed] for seed in sorted(set(one) & set(other))]


def told(values: Iterable[float], digits: int = 3, *, is_signed: bool = False) -> str:
    """Mean and spread as people write them; the number of values where it is not three."""
    found = list(values)
    if not found:
        return ""
    sign = "+" if is_signed else ""
    text = f"{mean(found):{sign}.{digits}f}"
    if len(found) > 1:
        text += f" \u00b1 {spread(found):.{digits}f}"
    return text if len(found) == len(SEEDS) else f"{text} (n={len(found)})"


def is_beyond(differences: Sequence[float], sign: int) -> bool:
    """Whether paired differences lie on one side: every seed, and the mean beyond twice its standard error."""
    if len(differences) < 2:
        return False
    error = spread(differences) / math.sqrt(len(differences))
    return all(sign * value > 0 for value in differences) and sign * mean(differences) > 2 * error


# -- writing ---------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head."""
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def save_table(book: Book, title: str, parts: Sequence[str]) -> None:
    path = book.folder / f"{book.name}.md"
    note = f"Drawn from `{book.path.name}` by `{Path(_script()).name}`; {len(book.runs)} runs."
    path.write_text("\n\n".join([f"# {title}", *parts, note]) + "\n", encoding="utf-8")
    print(path)


def save_figure(book: Book, figure: Any, name: str = "") -> None:
    """Beside the table, and shown at its end."""
    path = book.folder / f"{book.name}{name}.svg"
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    with (book.folder / f"{book.name}.md").open("a", encoding="utf-8") as page:
        page.write(f"\n![{path.stem}]({path.name})\n")
    print(path)


def axes(width: float = 7.0, height: float = 4.0, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    """An empty figure in the house style, drawn the same way every time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "stillroom"
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(rows, columns, figsize=(width, height), squeeze=False)
    found = list(grid.flat)
    for one in found:
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    return figure, found[0] if len(found) == 1 else found


def curve(axes: Any, points: Mapping[float, Collection[float]], **look: Any) -> None:
    """Mean and spread over seeds along an axis, where there are any."""
    shown = {place: found for place, found in points.items() if found}
    means, spreads = ([of(found) for found in shown.values()] for of in (mean, spread))
    axes.errorbar(list(shown), means, yerr=spreads, marker="o", capsize=3, **look)


COLOURS = ("#1a6b52", "#b5651d", "#888888", "#7a4fa3", "#2f6db3", "#b03a5b", "#6b8e23", "#444444", "#c9a227", "#5aa9a9")


def main(
    document: str | None, name: str, sweep: Callable[[Book], None], draw: Callable[[Book], None], folder: Path = RESULTS
) -> None:
    """The command line of a benchmark: run what is missing and draw, or draw alone."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["run", "draw"], default="run")
    args = parser.parse_args()
    book = Book(name, folder)
    if args.what == "run":
        begin = time.process_time()
        sweep(book)
        print(f"{name}: {time.process_time() - begin:.0f} CPU seconds")
    draw(book)


def _script() -> str:
    import sys

    return sys.argv[0]
