"""The cost model's results as tables. Every title says that it is a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PHASES = ("teacher", "student forward", "head", "student backward", "optimizer", "rest")


def write_tables(result: dict[str, Any], path: Path) -> Path:
    parts = [
        _opening(result),
        _bars(result),
        *_by_part(result),
        _all_cards(result),
        _assumptions(result),
        _cards(result),
    ]
    path.write_text("\n".join(parts))
    return path


def _opening(result: dict[str, Any]) -> str:
    versions = result["machine"]["versions"]
    return f"""# A step on a card, modelled

No card was used. Each step ran on fake tensors that say `cuda`, was written down kernel by kernel, and was turned into
time by published peaks (`benchmarks/gpu`). {result["tokens"]:,} tokens in rows of 512, a vocabulary of
{result["vocabulary"]:,}, forward KL at T = 1, clipping, AdamW. Written {result["date"][:10]} with torch
{versions["torch"]}, transformers {versions["transformers"]}, trl {versions["trl"]}.

The bound is the step's matrix products at the card's best dtype, one pass over the logits of both models in FP32 and
one over the optimizer's state. "Compiled" is a model of a compiler (`fusion.py`) on the recorded stream: inductor was
not run. What the host reads, and how far it runs ahead, is in the model; the choice of cuBLAS kernels, clocks, caches
and heat are not.
"""


def _bars(result: dict[str, Any]) -> str:
    lines = ["## Model: the bars, T4, FP16", "", "| models | what | modelled | bar | |", "|---|---|---|---|---|"]
    for bar in result["bars"]:
        said = "met" if bar["is_met"] else "missed"
        lines.append(f"| {bar['problem']} | {bar['what']} | {bar['value']:.2f} | {bar['bar']} | {said} |")
    return "\n".join([*lines, ""])


def _by_part(result: dict[str, Any]) -> list[str]:
    return [_one_card(name, cards["T4"]) for name, cards in result["problems"].items()]


def _one_card(name: str, found: dict[str, Any]) -> str:
    head = [
        "step",
        *_PHASES[:-1],
        "all",
        "x bound",
        "head x bound",
        "launches",
        "GB moved",
        "host reads",
        "peak GB",
        "x trl",
    ]
    lines = [f"## Model: {name} on a T4, milliseconds by part", "", _line(head), "|" + "---|" * len(head)]
    least = found["bound"]
    by_phase = {**least["products_by_phase"], "optimizer": least["optimizer"], "head": least["head"]}
    cells = [f"{1e3 * by_phase.get(phase, 0.0):.1f}" for phase in _PHASES[:-1]]
    lines.append(_line(["bound", *cells, f"{1e3 * least['step']:.1f}", "1", "1", "", "", "", "", ""]))
    for who, row in found["rows"].items():
        parts = [f"{1e3 * row['seconds_by_phase'].get(phase, 0.0):.1f}" for phase in _PHASES[:-1]]
        cells = [f"{1e3 * row['seconds']:.1f}", f"{row['x_bound']:.2f}", f"{row['head_x_bound']:.2f}",
                 f"{row['launches']:,}", f"{row['gigabytes']:.1f}", str(row["host_reads"]),
                 f"{row['peak_bytes'] / 1e9:.2f}", f"{row['x_trl_seconds']:.2f}"]  # fmt: skip
        lines.append(_line([who, *parts, *cells]))
    return "\n".join([*lines, ""])


def _all_cards(result: dict[str, Any]) -> str:
    cards = list(result["cards"])
    head = _line(["models", "step", *cards])
    lines = ["## Model: milliseconds a step on each card (x bound)", "", head, "|" + "---|" * (len(cards) + 2)]
    for name, found in result["problems"].items():
        lines.append(_line([name, "bound", *(f"{1e3 * found[card]['bound']['step']:.1f}" for card in cards)]))
        for who in found[cards[0]]["rows"]:
            rows = [found[card]["rows"].get(who) for card in cards]
            cells = [f"{1e3 * row['seconds']:.1f} ({row['x_bound']:.2f})" if row else "" for row in rows]
            lines.append(_line([name, who, *cells]))
    first = next(iter(result["problems"].values()))
    chosen = "; ".join(f"{card}: {first[card]['rows']['stillroom']['precision']}" for card in cards)
    return "\n".join([*lines, "", f"Stillroom's precision is what `auto` chooses: {chosen}.", ""])


def _assumptions(result: dict[str, Any]) -> str:
    head = _line(["models", "reached", "step", "ms", "x bound", "head x bound", "x trl"])
    lines = ["## Model: what changes if a T4 reaches less than its peaks", "", head, "|" + "---|" * 7]
    for name, found in result["problems"].items():
        for said, rows in found["T4"]["assumptions"].items():
            for who, row in rows.items():
                cells = [f"{1e3 * row['seconds']:.1f}", f"{row['x_bound']:.2f}", f"{row['head_x_bound']:.2f}",
                         f"{row['x_trl_seconds']:.2f}"]  # fmt: skip
                lines.append(_line([name, said, who, *cells]))
    return "\n".join([*lines, ""])


def _cards(result: dict[str, Any]) -> str:
    head = _line(["card", "half products, TFLOP/s", "FP32 products, TFLOP/s", "GB/s"])
    lines = ["## Model: the peaks it assumes (data sheets)", "", head, "|---|---|---|---|"]
    for name, card in result["cards"].items():
        lines.append(
            _line([name, str(card["half_tflops"]), str(card["fp32_tflops"]), str(card["gigabytes_per_second"])])
        )
    return "\n".join([*lines, ""])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
