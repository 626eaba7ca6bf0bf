"""Executes the PTX of the kernels on a CPU and writes what was found: results/ptx.json and kernel_bytes.json.

    python benchmarks/gpu/ptx_table.py          # some minutes on one core; no GPU is used

Levels of proof: *built* (registers and spills by ptxas), *executed as PTX* (errors against float64, races), *counted*
(bytes). Nothing here is a time.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "head"))

import datetime
import json
import tempfile
from dataclasses import asdict
from typing import Any

import triton
from measure import machine
from ptx_cases import MANY, T4, AdamCase, RowCase
from ptx_launch import build, resources

RESULTS = Path(__file__).with_name("results")
BYTES = Path(__file__).with_name("kernel_bytes.json")
ARCHITECTURES = (60, 70, 75, 80, 89)
VOCABULARIES = (49_152, 50_257, 151_936)
DENSE: dict[str, dict[str, float]] = {
    "forward_kl": {}, "jsd": {"beta": 0.5}, "reverse_kl": {}, "skew_forward_kl": {}, "skew_reverse_kl": {},
    "total_variation": {}, "alpha_beta": {}, "todi": {},
}  # fmt: skip
SPARSE = ("top-k", "sampled")


def rows() -> list[dict[str, Any]]:
    """Every kernel at every vocabulary, for a T4."""
    found = []
    for vocabulary in VOCABULARIES:
        for divergence, settings in DENSE.items():
            for num_blocks in (0, MANY):
                found.append(row(divergence, vocabulary, settings=settings, num_blocks=num_blocks))
        for kind in SPARSE:
            for num_blocks in (0, MANY):
                found.append(row("forward_kl", vocabulary, kind=kind, num_blocks=num_blocks))
    for divergence in ("forward_kl", "jsd"):
        for num_blocks in (0, MANY):
            found.append(row(divergence, VOCABULARIES[0], temperature=2.0, num_blocks=num_blocks))
    return found


def row(divergence: str, vocabulary: int, **options: Any) -> dict[str, Any]:
    case = RowCase(divergence, vocabulary, **options)
    built = build(case.launch, T4)
    slots = int(case.launch.arguments.get("num_parts", 1))
    run = case.executed(built, slots=slots, schedule="random")
    with tempfile.TemporaryDirectory() as folder:
        held = resources(built, Path(folder))
    exact = RowCase(divergence, vocabulary, half=None, **options)
    exact.executed(slots=slots, schedule="random", checks=False)
    said = {
        "divergence": divergence, "kind": options.get("kind", "dense"), "vocabulary": vocabulary,
        "temperature": options.get("temperature", 1.0), "form": "one pass" if options.get("num_blocks") else "passes",
        "errors": asdict(case.errors()), "gradient_error_before_rounding": exact.errors().gradient,
        "norm_error_before_rounding": exact.errors().norm,
        "bytes_per_element": case.bytes_per_element(run), "races": sum(run.races.values()),
        "instructions_per_element": 32 * sum(run.instructions.values()) / vocabulary, **held,
    }  # fmt: skip
    wanted = ("divergence", "kind", "vocabulary", "form", "bytes_per_element", "races", "registers", "spilled_bytes")
    print({key: said[key] for key in wanted}, flush=True)
    return said


def builds() -> list[dict[str, Any]]:
    """Registers and spills on every architecture. The form in one pass needs 7.0."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for architecture in ARCHITECTURES:
            given = [{"divergence": name, "settings": one, "temperature": 2.0} for name, one in DENSE.items()]
            for options in [*given, *({"kind": kind} for kind in SPARSE)]:
                for num_blocks in (0, MANY) if architecture >= 70 else (0,):
                    case = RowCase(num_tokens=49_152, num_blocks=num_blocks, **options)
                    held = resources(build(case.launch, architecture), Path(folder))
                    found.append({"architecture": architecture, "divergence": options.get("divergence", "forward_kl"),
                                  "kind": options.get("kind", "dense"),
                                  "form": "one pass" if num_blocks else "passes", **held})  # fmt: skip
    return found


def updates() -> dict[str, Any]:
    """AdamW with FP32 weights, and with FP16 weights and FP32 masters."""
    found = {}
    for name, is_half in (("fp32 weights", False), ("fp16-master", True)):
        case = AdamCase(is_half=is_half, sizes=(65_536, 32_768))
        built = build(case.launch, T4)
        run = case.executed(built, slots=2)
        with tempfile.TemporaryDirectory() as folder:
            held = resources(built, Path(folder))
        found[name] = {
            "error": case.error(), "races": sum(run.races.values()), "read": run.bytes_read() / case.num_parameters,
            "written": run.bytes_written() / case.num_parameters, "launches": 1, **held,
        }  # fmt: skip
    return found


def kernel_bytes(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Bytes an element of the logits and launches a chunk, for the cost model: counted at V = 49,152, T = 1."""
    forms = {}
    for one in found:
        if one["vocabulary"] == VOCABULARIES[0] and one["temperature"] == 1.0:
            name = one["divergence"] if one["kind"] == "dense" else one["kind"]
            forms.setdefault(name, {})[one["form"]] = {
                **one["bytes_per_element"],
                "launches": 1,
            }
    return forms


def main() -> None:
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = rows()
    adamw = updates()
    compiled = builds()
    result = {
        "benchmark": "kernels executed as PTX on a CPU: no GPU was used, no time is known",
        "date": started, "machine": machine(), "triton": triton.__version__, "rows": found, "adamw": adamw,
        "builds": compiled,
    }  # fmt: skip
    path = RESULTS / "ptx.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    said = {
        "what": "bytes in sectors of 32 for each element of the logits: counted in the T4's PTX at V = 49,152",
        "read": "logits of student and teacher", "written": "FP16 gradient",
        "small": "weights of rows, kept ids and sums that blocks exchange: read again by each warp, from L1 or L2",
        "head": kernel_bytes(found),
        "adamw": {"what": "bytes for each parameter",
                  **{name: {key: one[key] for key in ("read", "written", "launches")} for name, one in adamw.items()}},
    }  # fmt: skip
    BYTES.write_text(json.dumps(said, indent=1) + "\n")
    print(f"written: {path}, {BYTES}")


if __name__ == "__main__":
    main()
