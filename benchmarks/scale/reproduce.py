"""What the simulation makes of the steps that bench_scale.py measured: the same laws, with gloo's measured costs.

Bytes: those of wire.py beside what the loopback device carried; headers of packets and the small sums of a step are not
in the first. CPU: that of processes that tell each other nothing, and the measured cost of each collective and copy.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wire import Mesh, Weights, sent, window

SMALL_SUMS = 4  # of a step: counts, used gradients, evidence, and one to wait for the others
SMALL = 4096  # bytes
# Copies of a whole tensor into new memory, inside of a process: gathered weights are copied out, and gradients are laid
# out to be sent. Their other buffers, and DDP's, are taken to be memory that the process has already. One copy is
# a fit: on a loaded machine none gave 0.86 of the measured CPU of fsdp, two 1.02.
COPIES = {"all_reduce": 0.0, "all_gather": 1.0, "reduce_scatter": 1.0}


def call_cost(calls: Sequence[Mapping[str, Any]], kind: str, size: float) -> float:
    """CPU seconds of all processes in one call: straight lines between the measured sizes."""
    points = sorted((row["size"], row["cpu_seconds"]) for row in calls if row["kind"] == kind)
    if size <= points[0][0]:
        return float(points[0][1])
    pairs = list(itertools.pairwise(points))
    (left, low), (right, high) = next((pair for pair in pairs if size <= pair[1][0]), pairs[-1])
    return float(low + (high - low) * (size - left) / (right - left))


def entries(scale: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What was measured: two processes, and others where there are."""
    found = scale["found"]
    yield {"processes": 2, "window": 2, **found}
    yield from found.get("four", ())


def weights_of(scale: Mapping[str, Any]) -> Weights:
    found = scale["found"]
    return Weights(found["parameters"] - sum(found["layers"]), tuple(found["layers"]))


def reproduced(scale: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Empty where the collectives alone were not measured."""
    if "gloo" not in scale["found"]:
        return []
    gloo = {one["processes"]: one["calls"] for one in scale["found"]["gloo"]}
    weights = weights_of(scale)
    rows = []
    for one in entries(scale):
        number = one["processes"]
        share = one["window"] // number
        apart = statistics.median(each["apart"] for each in one["cpu_seconds"])
        for strategy in ("ddp", "fsdp"):
            calls = gloo[number]
            spent = SMALL_SUMS * call_cost(calls, "all_reduce", SMALL)
            for call in window(strategy, weights, Mesh(number), share):
                copies = COPIES[call.kind] * call_cost(calls, "copy", call.size)
                spent += call_cost(calls, call.kind, call.size) + copies
            seconds = apart + scale["steps"] * spent
            measured = statistics.median(each[strategy] for each in one["cpu_seconds"])
            payload = number * sent(strategy, weights, Mesh(number), share)
            rows.append(
                {
                    "processes": number,
                    "micro_batches": one["window"],
                    "strategy": strategy,
                    "bytes": payload,
                    "measured_bytes": one["bytes_per_step"][strategy],
                    "bytes_over_measured": payload / one["bytes_per_step"][strategy],
                    "cpu_seconds": seconds,
                    "measured_cpu_seconds": measured,
                    "cpu_over_measured": seconds / measured,
                }
            )
    return rows
