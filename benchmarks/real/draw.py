"""The table, the plot and the page of the benchmark, drawn from its result files and from nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Job = tuple[Any, ...]


@dataclass(frozen=True)
class Results:
    """The result files: one for each job, and the plan."""

    folder: Path

    def file(self, job: Job) -> Path:
        kind, *rest = job
        names = [f"{one:g}" if isinstance(one, float) else str(one) for one in rest]
        return self.folder / f"{kind}s" / f"{'-'.join(names)}.json"

    def jobs(self) -> set[Job]:
        """The jobs that have a file."""
        found: set[Job] = set()
        for path in self.folder.glob("*s/*.json"):
            kind, name = path.parent.name[:-1], path.stem
            first, _, last = name.rpartition("-")
            match kind:
                case "arm":
                    found.add((kind, first, int(last)))
                case "trial":
                    record = _read(path)
                    found.add((kind, record["arm"], record["rate"]))
                case "file":
                    found.add((kind, first, last))
                case _:
                    found.add((kind, name))
        return found

    @property
    def plan(self) -> Record:
        return _read(self.folder / "plan.json")

    def read(self, *job: Any) -> Record:
        return _read(self.file(job))

    def timing(self, name: str) -> Record:
        return self.read("timing", name)

    def tried(self, name: str) -> dict[float, float]:
        """Dev bits per byte by learning rate."""
        records = (self.read(*job) for job in self.jobs() if job[:2] == ("trial", name))
        return {record["rate"]: record["dev_bits_per_byte"] for record in records}

    def chosen_rate(self, name: str) -> float:
        tried = self.tried(name)
        return min(tried, key=lambda rate: tried[rate])


def _read(path: Path) -> Record:
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def draw(results: Results, docs: Path | None) -> None:
    """Write table, figures and plot next to the results, and the page into the documentation."""
