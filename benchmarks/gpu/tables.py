"""The cost model's results as tables. Every title says that it is a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PHASES = ("teacher", "student forward", "head", "student backward", "optimizer", "rest")


def write_tables(result: dict[str, Any], path: Path) -> Path:
    parts = [_opening(result), _bars(result), _heads(result), *_by_part(result), _all_cards(result), _cards(result)]
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
one over the optimizer's state. What the host reads, and how far it runs ahead, is in the model; the choice of cuBLAS
kernels, caches and heat are not. "stillroom" is the step as it is recorded, its rows fused by a model of a compiler.
With the "row kernel" the product's own calls around its Triton kernel are recorded, the kernel itself has bytes
{result["row_bytes"]["from"]}, and AdamW is one kernel (`design.py`). "Bodies compiled" is
a model of a compiler too (`fusion.py`). Sustained rates are 24 TFLOP/s and 80 % of the bandwidth on a T4. Nothing here
was measured on a GPU.
"""


def _bars(result: dict[str, Any]) -> str:
    lines = [
        "## Model: the bars, T4, FP16",
        "",
        "| models | what | rates | modelled | bar | |",
        "|---|---|---|---|---|---|",
    ]
    for bar in result["bars"]:
        said = "met" if bar["is_met"] else "missed"
        lines.append(
            f"| {bar['problem']} | {bar['what']} | {bar['rates']} | {bar['value']:.3f} | {bar['bar']} | {said} |"
        )
    return "\n".join([*lines, ""])


def _heads(result: dict[str, Any]) -> str:
    head = [
        "models",
        "divergence",
        "row kernel",
        "bytes an element",
        "ms at peaks",
        "x bound",
        "ms sustained",
        "x bound",
    ]
    lines = ["## Model: the head on a T4, by divergence and form of the row kernel", "", _line(head), "|" + "---|" * 8]
    for name, cards in result["problems"].items():
        for row in cards["T4"]["head"]:
            cells = [f"{sum(row['bytes_per_element']):.4g}"]
            for said in ("peaks", "sustained"):
                cells += [f"{1e3 * row[said]['seconds']:.2f}", f"{row[said]['x_bound']:.2f}"]
            lines.append(_line([name, row["divergence"], row["form"], *cells]))
    return "\n".join([*lines, ""])


def _by_part(result: dict[str, Any]) -> list[str]:
    found = [(name, cards["T4"]) for name, cards in result["problems"].items()]
    at_peaks = [_one_card(f"{name} on a T4 at its peaks", one["rows"], one["bound"]) for name, one in found]
    sustained = [
        _one_card(f"{name} on a T4 at sustained rates", one["sustained"]["rows"], one["sustained"]["bound"])
        for name, one in found
    ]
    return at_peaks + sustained


def _one_card(title: str, rows: dict[str, Any], least: dict[str, Any]) -> str:
    has_all = "launches" in next(iter(rows.values()))
    more = ["launches", "GB moved", "host reads", "peak GB", "x trl's peak"] if has_all else []
    head = ["step", *_PHASES[:-1], "all", "x bound", "head x bound", "x trl", *more]
    lines = [f"## Model: {title}, milliseconds by part", "", _line(head), "|" + "---|" * len(head)]
    by_phase = {**least["products_by_phase"], "optimizer": least["optimizer"], "head": least["head"]}
    cells = [f"{1e3 * by_phase.get(phase, 0.0):.1f}" for phase in _PHASES[:-1]]
    lines.append(_line(["bound", *cells, f"{1e3 * least['step']:.1f}", "1", "1", "", *("" for _ in more)]))
    for who, row in rows.items():
        parts = [f"{1e3 * row['seconds_by_phase'].get(phase, 0.0):.1f}" for phase in _PHASES[:-1]]
        cells = [f"{1e3 * row['seconds']:.1f}", f"{row['x_bound']:.2f}", f"{row['head_x_bound']:.2f}",
                 f"{row['x_trl_seconds']:.2f}"]  # fmt: skip
        if has_all:
            cells += [f"{row['launches']:,}", f"{row['gigabytes']:.1f}", str(row["host_reads"]),
                      f"{row['peak_bytes'] / 1e9:.2f}", f"{row['x_trl_peak']:.2f}"]  # fmt: skip
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


def _cards(result: dict[str, Any]) -> str:
    head = _line(
        ["card", "half products, TFLOP/s", "FP32 products, TFLOP/s", "GB/s", "sustained products", "memory, GiB"]
    )
    lines = [
        "## Model: the rates it assumes: data sheets, and the share of products that is sustained",
        "",
        head,
        "|---|---|---|---|---|---|",
    ]
    for name, card in result["cards"].items():
        rates = [f"{card[key]:g}" for key in ("half_tflops", "fp32_tflops", "gigabytes_per_second")]
        lines.append(_line([name, *rates, f"{card['sustained'][0]:.0%}", f"{card['memory_bytes'] / 2**30:.2f}"]))
    return "\n".join([*lines, ""])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
