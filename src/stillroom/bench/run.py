"""Run the parts of `stillroom bench`, each in a process with a time limit; judge them; make a block to paste.

The result is written after every part, so a part that hangs or dies costs itself alone. Nothing is sent anywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stillroom.bench.parts import PARTS, PHASES, Clock, rates_of
from stillroom.bench.predictions import judge, read_predictions
from stillroom.core.errors import ConfigError, DataError
from stillroom.core.files import strict, write_atomically
from stillroom.precision.device import find_device
from stillroom.precision.gpus import Kernels, gpu_in, seconds_of

FORMAT = 1
_MARK = "stillroom bench result: "
_HEAD = f"stillroom-bench {FORMAT} sha256:"
# Of the minutes, at most: a part that hangs leaves time for the others.
_SHARES = {"facts": 0.25, "constants": 0.15, "kernels": 0.25, "step": 0.4, "distillation": 0.25}
_MOST_BYTES = 20_000  # of a block that somebody pasted


# -- parts in processes --------------------------------------------------------------------------------------


def run_part(name: str, device: str, seconds: float) -> dict[str, Any]:
    """A part in its own process: memory begins at nothing, and a crash or a hang ends there."""
    command = [sys.executable, "-m", "stillroom.bench.run", name, device]
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
        printed, error = done.stdout, ""
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing was said"]
            error = f"the process ended with {done.returncode}: {last[0][:300]}"
    except subprocess.TimeoutExpired as late:
        printed, error = late.stdout or b"", f"not finished after {seconds:.0f} s"
    # The last line with our mark: what was found until then.
    marked = [line for line in printed.decode(errors="replace").splitlines() if line.startswith(_MARK)]
    try:
        found = json.loads(marked[-1].removeprefix(_MARK)) if marked else {}
    except ValueError:  # cut off in the middle of a line
        found = json.loads(marked[-2].removeprefix(_MARK)) if len(marked) > 1 else {}
    took = {"took_seconds": round(time.monotonic() - began, 1)}
    return {**found, **({"error": error} if error else {}), **took}


def bench(
    device: str = "auto",
    *,
    parts: Sequence[str] = (),
    minutes: float = 10.0,
    out: Path | None = None,
    tell: Callable[[str], None] = lambda _text: None,
    run: Callable[[str, str, float], dict[str, Any]] = run_part,
) -> dict[str, Any]:
    """Run the parts (all, where none is named) within so many minutes; write the result to `out` after each."""
    if strange := sorted(set(parts) - set(PARTS)):
        advice = [f"one of {', '.join(PARTS)}"]
        raise ConfigError(f"there is no part {', '.join(strange)}", where="--part", advice=advice)
    where = str(find_device(device, tell))
    end = time.monotonic() + 60 * minutes
    result: dict[str, Any] = {"format": FORMAT, "predictions": read_predictions()["written"]}
    for name in [name for name in PARTS if not parts or name in parts]:
        left = min(end - time.monotonic(), 60 * minutes * (1.0 if len(parts) == 1 else _SHARES[name]))
        tell(f"{name} ...")
        result[name] = run(name, where, left) if left > 1 else {"error": "no time was left; --minutes gives more"}
        result["verdict"] = verdict(result)
        if out is not None:
            write_atomically(out, (json.dumps(strict(result), indent=1) + "\n").encode())
    return result


# -- the verdict ---------------------------------------------------------------------------------------------


def verdict(result: Mapping[str, Any]) -> dict[str, Any]:
    """Every measurement that was predicted, and the step against its bound, by published and by measured rates."""
    gpu = gpu_in(str(result.get("facts", {}).get("device", "")))
    published, own = gpu.peak if gpu is not None else None, rates_of(dict(result))
    judged = judge(measurements(result), published=published, own=own)
    return {
        "gpu": gpu.name if gpu is not None else None,
        "judged": [one.to_dict() for one in judged],
        "outside": [one.name for one in judged if one.is_inside is False],
        "x_bound": _over_bound(result, own),
    }


def measurements(result: Mapping[str, Any]) -> dict[str, float]:
    """The figures by the names of predictions."""
    found = {row["name"]: row["seconds"] for row in result.get("kernels", {}).get("rows", ())}
    for row in result.get("step", {}).get("rows", ()):
        for phase in PHASES if "seconds" in row else ():
            found[f"step/{row['name']}/{phase}"] = row["seconds"][phase]
        if "peak_allocated" in row:
            found[f"memory/{row['name']}"] = row["peak_allocated"]
    return found


def _over_bound(result: Mapping[str, Any], rates: Any) -> dict[str, float]:
    """Seconds of a step over those that its products and passes need at the measured rates."""
    part = result.get("step", {})
    if rates is None or "bound" not in part:
        return {}
    least = sum(seconds_of([Kernels(*one) for one in work], rates) for work in part["bound"].values())
    return {row["name"]: row["seconds"]["all"] / least for row in part["rows"] if "seconds" in row}


# -- a block to paste ----------------------------------------------------------------------------------------


def block(result: Mapping[str, Any]) -> str:
    """The figures that a reader needs, as one line of JSON below a line with its checksum."""
    facts, judged = result.get("facts", {}), result.get("verdict", {})
    constants, last = result.get("constants", {}), result.get("distillation", {})
    body = {
        "format": FORMAT,
        "predictions": result.get("predictions"),
        **{key: facts.get(key) for key in ("device", "kind", "architecture", "device_bytes", "driver", "cuda_of_torch",
                                           "versions", "python", "kernel", "selftest_failed")},
        "rates": constants.get("rates"),
        "pinned": constants.get("pinned_copy_bytes_per_second"),
        "smi": [constants.get(f"nvidia_smi_{when}") for when in ("before", "after")],
        "heads": {row["name"]: [row["seconds"], row["is_right"]] for row in result.get("kernels", {}).get("rows", ())},
        "steps": {row["name"]: row.get("seconds", row.get("error")) for row in result.get("step", {}).get("rows", ())},
        "peaks": {row["name"]: row.get("peak_allocated") for row in result.get("step", {}).get("rows", ())},
        "distillation": {key: last.get(key) for key in ("status", "steps", "tokens_per_second", "first_loss_apart")},
        "ratios": {one["name"]: [one["at_published"], one["at_measured"]] for one in judged.get("judged", ())},
        "x_bound": judged.get("x_bound"),
        "errors": {name: result[name]["error"] for name in PARTS if "error" in result.get(name, {})},
    }  # fmt: skip
    text = json.dumps(_short(strict(body)), separators=(",", ":"), sort_keys=True, allow_nan=False)
    return f"{_HEAD}{_checksum(text)}\n{text}"


def _short(value: Any) -> Any:
    """Four digits are more than a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _short(one) for key, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list | tuple) else value


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_block(text: str) -> dict[str, Any]:
    """A block that somebody pasted, checked: it comes from anywhere."""
    where = "the block"
    lines = [line.strip() for line in text.strip().strip("`").splitlines() if line.strip()]
    lines = lines[next((i for i, line in enumerate(lines) if line.startswith(_HEAD)), len(lines)) :]
    if len(lines) < 2 or len(text) > _MOST_BYTES:
        raise DataError(f"there is no line {_HEAD}... with a line of JSON below it", where=where)
    if lines[0].removeprefix(_HEAD) != _checksum(lines[1]):
        raise DataError("the checksum is not that of the figures: some were changed or cut off", where=where)
    try:
        found = json.loads(lines[1])
    except ValueError as error:
        raise DataError(f"it is no JSON: {error}", where=where) from error
    wanted: dict[str, type | tuple[type, ...]] = {
        "device": str, "kind": str, "kernel": str, "versions": dict, "rates": dict, "steps": dict, "ratios": dict,
        "heads": dict, "errors": dict,
    }  # fmt: skip
    given = found if isinstance(found, dict) else {}
    wrong = [key for key, kind in wanted.items() if not isinstance(given.get(key), kind)]
    if wrong:
        raise DataError(f"{', '.join(wrong)} of it are missing, or of another kind", where=where)
    return given


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """The result for a person."""
    facts, constants = result.get("facts", {}), result.get("constants", {})
    lines = []
    if facts and "error" not in facts:
        failed = facts["selftest_failed"]
        lines.append(f"device     {facts['device']} {facts['architecture']}, rows of the head: {facts['kernel']}")
        lines.append(
            f"selftest   {facts['selftest_trials']} trials, {len(failed)} failed {'; '.join(failed)[:200]}".rstrip()
        )
    if rates := constants.get("rates"):
        lines.append(
            f"rates      {rates['half'] / 1e12:.3g} TFLOP/s half, {rates['fp32'] / 1e12:.3g} FP32, "
            f"{rates['bandwidth'] / 1e9:.3g} GB/s, {1e6 * rates['host']:.3g} us an operation"
        )
    for row in result.get("kernels", {}).get("rows", ()):
        right = "" if row["is_right"] else f"  WRONG: loss apart by {row['loss_apart']:.2g}"
        lines.append(f"{row['name']:<34}{1e3 * row['seconds']:>9.2f} ms{right}")
    for row in result.get("step", {}).get("rows", ()):
        if "error" in row:
            lines.append(f"step {row['name']}: {row['error']}")
            continue
        parts = ", ".join(f"{phase} {1e3 * row['seconds'][phase]:.1f}" for phase in PHASES)
        over = result.get("verdict", {}).get("x_bound", {}).get(row["name"])
        times = f", {over:.2f} x its bound at these rates" if over is not None else ""
        times += ": the machine was busier when its rates were measured" if over is not None and over < 1 else ""
        lines.append(f"step {row['name']}: {1e3 * row['seconds']['all']:.1f} ms{times}")
        lines.append(f"           {parts} ms")
    last = result.get("distillation", {})
    if last.get("tokens_per_second"):
        lines.append(f"distilled  {last['steps']} steps, {last['tokens_per_second']:,.0f} tokens/s ({last['status']})")
    for one in result.get("verdict", {}).get("judged", ()):
        pair = [f"{one[key]:.2f}" if one[key] is not None else "-" for key in ("at_published", "at_measured")]
        note = "" if one["is_inside"] is not False else f"  outside of {one['interval'][0]} to {one['interval'][1]}"
        lines.append(f"{one['name']:<44}{pair[0]:>7} by data sheet {pair[1]:>7} by measured rates{note}")
    lines += [f"{name}: {result[name]['error']}" for name in PARTS if "error" in result.get(name, {})]
    return lines


def main(words: Sequence[str]) -> None:
    """The process of one part: its figures are the last line."""
    name, device = words
    where = torch.device(device)

    def keep(found: dict[str, Any]) -> None:
        sys.stdout.write("\n" + _MARK + json.dumps(strict(found), allow_nan=False) + "\n")
        sys.stdout.flush()

    keep(PARTS[name](where, Clock(where, keep)))


if __name__ == "__main__":
    main(sys.argv[1:])
