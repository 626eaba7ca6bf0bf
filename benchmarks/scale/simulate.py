"""Steps of Stillroom on 1 to 1,024 cards, simulated. Nothing of it was run on a card.

    python benchmarks/scale/simulate.py          # about four minutes; writes results/simulation.json and simulation.md

It begins with what was measured: the steps of two and four processes that bench_scale.py took have to come out
(reproduce.py), and the steps that benchmarks/gpu recorded kernel by kernel (layer_time.py). Then the same laws are used
with the published rates of cards and links (platforms.py), event by event (timeline.py), and with the memory of a
process by the formulas of `stillroom plan` (rank_memory.py). The same inputs give the same file, but for the date.

`hsdp` is fsdp with `train.shard_size` = the cards of a node. Teachers: `replicated` on every card; `sharded` over them,
gathered layer by layer; `served` by a fleet of as many cards as keep up, which sends no more than a cache stores;
`cached`, asked before. Results of before `teacher.ranks` was removed also have rows of `own ranks`.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import platforms
from layer_time import RECORDED, Compute, calibrated, reproduction
from platforms import PLATFORMS, Platform
from rank_memory import FITS, Memory, pairs
from reproduce import reproduced
from simulation_tables import written
from timeline import Job, bottleneck, sent, step
from wire import Mesh

from stillroom.training.trace import Sizes

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CACHES = HERE.parent / "cache" / "results" / "smollm2.json"
LENGTH, TOKENS = 2048, 1 << 21  # of a row, of a step: 1,024 rows
NUMBERS = (1, 2, 8, 64, 256, 1024)
GRID = {
    "135M <- 360M": ("T4", "V100", "A100", "H100"),
    "1B <- 8B": ("T4", "V100", "A100", "H100"),
    "3B <- 70B": ("A100", "H100"),
    "8B <- 671B MoE": ("H100",),
}
ROWS = (4, 1)  # of a micro-batch: the first that fits
FLEET_ROWS = 16  # of a batch of a served teacher
JITTER = 0.02  # of a step: standard deviation of a process, where stragglers are counted
TRILLION = 10**12


@dataclass(frozen=True)
class World:
    """A pair of models on a kind of card."""

    memory: Memory
    platform: Platform
    compute: Compute

    @property
    def card_bytes(self) -> float:
        return FITS * float(self.platform.card.facts.memory_bytes)

    @property
    def holders(self) -> int:
        """Cards that hold the teacher's weights together, in powers of two: a fifth is left for its work."""
        weights = self.memory.teacher.parameters * self.memory.teacher.itemsize
        return 1 << max(0, math.ceil(math.log2(weights / (0.8 * self.card_bytes))))

    @property
    def teacher_seconds(self) -> float:
        """Seconds of one card for each token that a teacher reads alone. Splitting it over cards costs nothing here."""
        tokens = FLEET_ROWS * LENGTH
        teacher = self.memory.teacher
        parts = self.compute.parts(teacher, teacher, tokens)
        return (parts.teacher_layer * teacher.layers + parts.teacher_head) / tokens


def strategies(number: int, node: int) -> tuple[str, ...]:
    if number == 1:
        return ("single",)
    return ("ddp", "fsdp", "hsdp") if number > node and number % node == 0 else ("ddp", "fsdp")


def trained(world: World, strategy: str, number: int, teacher: str) -> dict[str, Any]:
    """A step whose teacher is on the same cards, or on none of them."""
    mesh = Mesh(number, world.platform.node)
    is_here = teacher in ("replicated", "sharded")
    for rows in ROWS:
        held = world.memory.held(strategy, mesh, teacher, rows=rows)
        fits = held.total <= world.card_bytes and rows * number * LENGTH <= TOKENS
        if fits:
            break
    row = {"gpus": number, "strategy": strategy, "teacher": teacher, "memory_gb": held.total / 1e9, "fits": fits}
    if not fits:
        return row
    asked: Sizes | None = world.memory.teacher if is_here else None
    job = Job(held.student, asked, mesh, strategy, teacher == "sharded", TOKENS, rows, LENGTH)
    played = step(job, world.compute, world.platform)
    name, saved = bottleneck(job, world.compute, world.platform)
    inside, between = sent(job)
    return row | {
        "rows": rows,
        "micro_batches": job.num_micro,
        "seconds": played.seconds,
        "tokens_per_second": TOKENS / played.seconds,
        "gb_sent_inside": inside / 1e9,
        "gb_sent_between": between / 1e9,
        "network_seconds": played.carried,
        "overlap": played.overlap,
        "bottleneck": name,
        "saved_by": {key: value for key, value in saved.items() if value >= 0.005},
        "gpu_hours_per_billion": number * played.seconds / TOKENS * 1e9 / 3600,
    }


def served(world: World, row: dict[str, Any]) -> dict[str, Any]:
    """The same step with stored answers, and a fleet that makes them as fast as they are used."""
    needed = row["tokens_per_second"] * world.teacher_seconds
    fleet = world.holders * math.ceil(needed / world.holders)
    hours = (row["gpus"] + fleet) * row["seconds"] / TOKENS * 1e9 / 3600
    return row | {"teacher": "served", "fleet": fleet, "gpu_hours_per_billion": hours}


def rows_of(world: World) -> Iterator[dict[str, Any]]:
    for number in NUMBERS:
        here = [trained(world, one, number, "replicated") for one in strategies(number, world.platform.node)]
        if number > 1:
            here += [trained(world, one, number, "sharded") for one in strategies(number, world.platform.node)]
        cached = [trained(world, one, number, "cached") for one in strategies(number, world.platform.node)]
        yield from [*here, *cached]
        fitting = [one for one in cached if one["fits"]]
        if fitting:
            yield served(world, min(fitting, key=lambda one: float(one["seconds"])))


def fleets(rows: list[dict[str, Any]], world: World, bytes_per_position: float) -> list[dict[str, Any]]:
    """A live teacher beside a cache at each number of cards, the best of each: a trillion tokens, and when it pays."""
    found = []
    for number in NUMBERS:
        fitting = [one for one in rows if one["gpus"] == number and one["fits"]]
        live = [one for one in fitting if one["teacher"] != "cached"]
        cached = [one for one in fitting if one["teacher"] == "cached"]
        if not cached:
            continue
        stored = min(cached, key=lambda one: float(one["gpu_hours_per_billion"]))
        asking = world.teacher_seconds * 1e9 / 3600  # GPU hours for a billion tokens
        row = {"gpus": number, "cached": stored["gpu_hours_per_billion"], "asking_once": asking}
        row["days_cached"] = TRILLION / stored["tokens_per_second"] / 86400
        if live:
            best = min(live, key=lambda one: float(one["gpu_hours_per_billion"]))
            row |= {"live": best["gpu_hours_per_billion"], "live_teacher": best["teacher"]}
            row |= {"live_strategy": best["strategy"], "days_live": TRILLION / best["tokens_per_second"] / 86400}
            saved = row["live"] - row["cached"]
            row["passes_to_pay"] = asking / saved if saved > 0 else None
        found.append(row | {"cache_gb_a_second": stored["tokens_per_second"] * bytes_per_position / 1e9})
    return found


def simulate(folder: Path, bytes_per_position: float) -> dict[str, Any]:
    passes = calibrated()
    found: dict[str, Any] = {}
    for name, pair in pairs(LENGTH).items():
        cards: dict[str, Any] = {}
        memories: dict[int, Memory] = {}  # cards of as many bytes hold the same: those of 16 GB have no bf16 either
        for card in GRID[name]:
            platform = PLATFORMS[card]
            size = platform.card.facts.memory_bytes
            memory = memories[size] = memories.get(size) or Memory(pair, card, folder, length=LENGTH)
            world = World(memory, platform, Compute(platform.card, passes, LENGTH))
            rows = list(rows_of(world))
            cards[card] = {
                "rows": rows,
                "fleets": fleets(rows, world, bytes_per_position),
                "teacher_cards": world.holders,
                "teacher_tokens_per_second_and_card": 1 / world.teacher_seconds,
            }
        teacher = memory.teacher
        held = memory.held("single", Mesh(1), "cached", rows=1)
        found[name] = {
            "student_parameters": held.student.parameters,
            "teacher_parameters": teacher.parameters,
            "teacher_visited": teacher.parameters - teacher.experts * (1 - teacher.visited),
            "cards": cards,
        }
    return found


def stragglers(number: int) -> float:
    """How much longer a step is that waits for the slowest of n: the usual bound of a maximum of normal numbers."""
    return 1.0 + JITTER * math.sqrt(2 * math.log(number)) if number > 1 else 1.0


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def bytes_of_a_position() -> float:
    signals = json.loads(CACHES.read_text())["signals"]
    return float(next(one["bytes_per_position"] for one in signals if one["kind"] == "hybrid" and one["m"] == 8))


def main() -> None:
    sys.path.insert(0, str(HERE.parent / "head"))
    from measure import machine

    each = bytes_of_a_position()
    passes = calibrated()
    scale = json.loads((RESULTS / "scale.json").read_text())
    with tempfile.TemporaryDirectory() as name:
        found = simulate(Path(name), each)
    here = machine()
    result = {
        "benchmark": "simulation: nothing was run on a card",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "machine": {key: here[key] for key in ("processor", "python", "versions")},
        "tokens_per_step": TOKENS,
        "length": LENGTH,
        "cache": {
            "bytes_per_position": each,
            "terabytes_per_trillion": each,
            "from": str(CACHES.relative_to(HERE.parent)),
        },
        "shares": {
            "products": platforms.PRODUCT_SHARE,
            "memory": platforms.MEMORY_SHARE,
            "links": platforms.LINK_SHARE,
        },
        "sources": {
            **{one.name: one.source for one in PLATFORMS.values()},
            "latency": platforms.LINKS_FROM,
            "passes over memory": f"{RECORDED.relative_to(HERE.parents[1])}: {passes.by_phase}",
        },
        "reproduced": {"measured": reproduced(scale), "recorded": reproduction(passes)},
        "stragglers": {str(number): stragglers(number) for number in NUMBERS},
        "pairs": found,
    }
    # A row of a table is one line.
    rows = re.compile(r"\{(?:[^{}]|\{[^{}]*\})*\}")
    text = rows.sub(lambda one: " ".join(one[0].split()), json.dumps(rounded(result), indent=1))
    (RESULTS / "simulation.json").write_text(text + "\n")
    (RESULTS / "simulation.md").write_text(written(rounded(result)))
    print(written(rounded(result)))


if __name__ == "__main__":
    main()
