"""The simulation's results as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

STRATEGIES = ("single", "ddp", "fsdp", "hsdp")


def written(result: Mapping[str, Any]) -> str:
    parts = [_head(result), _reproduced(result["reproduced"])]
    for name, pair in result["pairs"].items():
        for card, found in pair["cards"].items():
            parts += [_steps(name, card, found), _fleets(name, card, found)]
    return "\n".join([*parts, _sources(result)])


def _head(result: Mapping[str, Any]) -> str:
    shares = result["shares"]
    waits = f"{100 * (result['stragglers']['1024'] - 1):.0f} %"
    return f"""# From one card to 1,024, simulated

Nothing here was run on a card. `simulate.py` wrote it on {result["date"][:10]} with torch
{result["machine"]["versions"]["torch"]}, from published rates: products reach {shares["products"]:.0%} of their peak,
memory {shares["memory"]:.0%} and links {shares["links"]:.0%}. A step has {result["tokens_per_step"]:,} tokens in rows
of {result["length"]:,} at every number of cards, so more cards have fewer micro-batches. Weights are gathered and
gradients sent in FP32, as Stillroom does it.

Left out: the choice of kernels, clocks and heat, links that others use, collectives that take from a card's own speed,
reading of data, checkpoints, evaluations, failures, and what splitting a teacher over several cards costs beside its
weights. Cards that vary by 2 % from step to step would make a step of 1,024 about {waits} longer; that is not in the
tables.
"""


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    cells = list(head)
    return [_line(cells), "|" + "---|" * len(cells), *map(_line, rows), ""]


def _line(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _measured(row: Mapping[str, Any]) -> list[Any]:
    told = [row["processes"], row["micro_batches"], row["strategy"], f"{row['bytes'] / 1e6:.2f}"]
    told += [f"{row['measured_bytes'] / 1e6:.2f}", f"{row['bytes_over_measured']:.3f}", f"{row['cpu_seconds']:.2f}"]
    return [*told, f"{row['measured_cpu_seconds']:.2f}", f"{row['cpu_over_measured']:.3f}"]


def _recorded(row: Mapping[str, Any]) -> list[Any]:
    told = [row["models"], row["card"], f"{1e3 * row['seconds']:.1f}", f"{1e3 * row['recorded_seconds']:.1f}"]
    return [*told, f"{row['over_recorded']:.3f}", f"{row['furthest_part']} {row['furthest_over_recorded']:.2f}"]


def _reproduced(found: Mapping[str, Any]) -> str:
    lines = ["## What was measured, by the same laws", ""]
    if found["measured"]:
        head = ["processes", "micro-batches", "strategy", "MB in a step", "measured", "ratio"]
        lines += _table([*head, "CPU s", "measured", "ratio"], map(_measured, found["measured"]))
    else:
        lines += ["The collectives alone were not measured when this was written: run bench_scale.py first.", ""]
    lines += ["Steps that benchmarks/gpu recorded kernel by kernel, at the cards' peaks:", ""]
    head = ["models", "card", "ms", "recorded", "ratio", "furthest part"]
    return "\n".join([*lines, *_table(head, map(_recorded, found["recorded"]))])


def _steps(name: str, card: str, found: Mapping[str, Any]) -> str:
    head = ("cards", "strategy", "teacher", "GB a card", "rows x micro-batches", "s a step", "tokens/s")
    head += ("GB sent inside", "GB sent between", "overlap", "bottleneck", "GPU hours for 1e9 tokens")
    rows = []
    for row in found["rows"]:
        told = [row["gpus"], row["strategy"], _teacher(row), f"{row['memory_gb']:.1f}"]
        if not row["fits"]:
            rows.append([*told, "does not fit", *[""] * 7])
            continue
        told += [f"{row['rows']} x {row['micro_batches']}", f"{row['seconds']:.3g}", f"{row['tokens_per_second']:,.0f}"]
        told += [f"{row['gb_sent_inside']:.3g}", f"{row['gb_sent_between']:.3g}", f"{row['overlap']:.0%}"]
        rows.append([*told, row["bottleneck"], f"{row['gpu_hours_per_billion']:.3g}"])
    return "\n".join([f"## {name} on {card}", "", *_table(head, rows)])


def _teacher(row: Mapping[str, Any]) -> str:
    if "fleet" in row:
        return f"served by {row['fleet']} more"
    return f"on {row['teacher_gpus']} of them" if "teacher_gpus" in row else str(row["teacher"])


def _fleets(name: str, card: str, found: Mapping[str, Any]) -> str:
    head = ("cards", "live", "GPU hours live", "cached", "asking once", "passes until a cache pays")
    head += ("days for 1e12 tokens live", "cached", "GB/s read")
    rows = []
    for row in found["fleets"]:
        live = row.get("live")
        told = [row["gpus"], f"{row['live_teacher']}, {row['live_strategy']}" if live else "does not fit"]
        told += [f"{live:.3g}" if live else "", f"{row['cached']:.3g}", f"{row['asking_once']:.3g}"]
        told += [
            f"{row['passes_to_pay']:.2f}" if row.get("passes_to_pay") else "",
            f"{row['days_live']:.3g}" if live else "",
        ]
        rows.append([*told, f"{row['days_cached']:.3g}", f"{row['cache_gb_a_second']:.2g}"])
    told = f"{name} on {card}: a live teacher beside stored answers, GPU hours for 1e9 tokens"
    return "\n".join([told, "", *_table(head, rows)])


def _sources(result: Mapping[str, Any]) -> str:
    each = result["cache"]["bytes_per_position"]
    cache = f"{each:.1f} bytes a position ({result['cache']['from']}): so many terabytes for 1e12 tokens"
    rows = [*result["sources"].items(), ("cache", cache)]
    return "\n".join(["## Where the constants are from", "", *_table(("what", "from"), rows)])
