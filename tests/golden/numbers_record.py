"""The golden record of a run's numbers: losses, gradient norms and the bits of the final student.

    PYTHONPATH=src .venv/bin/python tests/golden/numbers_record.py    # after a change that means to alter numbers

A change that should not alter numbers leaves the record as it is. On the machine that wrote it (same processor flags,
same versions) the comparison is to the last bit; elsewhere to a hundred-thousandth.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import process_jobs
import tiny
import torch
from safetensors.torch import load_file, save_file

from stillroom.config import load_config, preset_names
from stillroom.telemetry import read_events
from stillroom.training.distill import distill

RECORD = Path(__file__).with_name("numbers.json")
WORLDS = {name: Path(__file__).parent / "worlds" / name for name in ("dense", "moe")}
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
_STEPS = 6
_BOTH = {"objectives.kd.weight": 0.7, "objectives.ce.weight": 0.3}

Setting = dict[str, Any]


def _precisions() -> dict[str, Setting]:
    modes = ("fp32", "bf16-mixed", "fp16-mixed", "fp16-master", "fp16-split", "fp16-sr")
    return {f"precision {mode}": {"precision.mode": mode, **_BOTH} for mode in modes}


def _routers() -> dict[str, Setting]:
    modes = ("all-experts", "knowledge-augmentation", "truth", "sar", "sar-joint", "sar-transient", "sar-meta")
    return {f"router {mode}": {"teacher.router.mode": mode, "world": "moe", **_BOTH} for mode in modes}


# What a preset needs of the small world: experts, or answers that fit into its short rows.
_ADDED: dict[str, Setting] = {"sar": {"world": "moe"}, "on-policy": {"rollouts.max_new_tokens": 8}}
CASES: dict[str, Setting] = {
    **_precisions(),
    **_routers(),
    **{f"preset {name}": {"preset": name, **_ADDED.get(name, {})} for name in preset_names()},
    "accumulation": {"train.gradient_accumulation_steps": 4, "train.batch_size": 1, **_BOTH},
    "rows of all lengths": {"data.packing": "rows", **_BOTH},
    "top-k": {"objectives.kd.top_k": 8, "objectives.kd.temperature": 2.0},
    "jsd": {"objectives.kd.divergence": "jsd", **_BOTH},
    "inner terms": {
        "objectives.feature.weight": 0.1,
        "objectives.attention.weight": 0.1,
        "objectives.layerwise.weight": 0.1,
        "objectives.contrastive.weight": 0.1,
        **_BOTH,
    },
    "moments in bf16": {"precision.moments": "bfloat16", **_BOTH},
    "plain kernel": {"objectives.kernel": "plain", **_BOTH},
    "faults": {"inject": "nan_weight@3,inf_grad@5", "guard.snapshot_steps": 2, **_BOTH},
}
TWO_PROCESSES = "two processes"


def fingerprint() -> dict[str, str]:
    """What the last bit of a result depends on beside the code."""
    flags = ""
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        lines = [line for line in cpu.read_text().splitlines() if line.startswith(("flags", "model name", "Features"))]
        flags = hashlib.sha256("\n".join(sorted(set(lines))).encode()).hexdigest()[:16]
    found = {"processor": platform.machine(), "flags": flags, "python": platform.python_version()}
    return found | {package: metadata.version(package) for package in _PACKAGES}


def settings_of(case: Setting) -> tuple[str, Setting, str]:
    """(preset, dotted settings, faults) of a case: those that tests share, with the case's own on top."""
    own = {key: value for key, value in case.items() if "." in key}
    shared = tiny.settings(WORLDS[case.get("world", "dense")])
    if "preset" in case:  # what makes the preset is its own; only models, data and length are ours
        shared = {key: shared[key] for key in shared if key not in ("train.learning_rate", "train.batch_size")}
    base = {"train.max_steps": _STEPS, "train.eval_steps": 3, "eval.max_batches": 2, "eval.samples": 0}
    return case.get("preset", "base"), {**shared, **base, **own}, case.get("inject", "")


def is_fp32(name: str) -> bool:
    """Whether the run of a case rounds no product to half precision."""
    if name == TWO_PROCESSES:
        return True
    preset, overrides, _inject = settings_of(CASES[name])
    return load_config(preset=preset, overrides=overrides).precision.mode in ("auto", "fp32")


def numbers_of(folder: Path) -> dict[str, Any]:
    """Losses and norms of every attempt, and the digest of the final student. Hexadecimal keeps every bit."""
    steps = [event for event in read_events(folder / "events.jsonl") if event["event"] == "step"]
    return {
        "losses": [_exact(step["train_loss"]) for step in steps],
        "norms": [_exact(step["grad_norm"]) for step in steps],
        "student": hashlib.sha256((folder / "student" / "model.safetensors").read_bytes()).hexdigest(),
    }


def _exact(value: float | None) -> str:
    return "null" if value is None else float(value).hex()


def run_case(name: str, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    if name == TWO_PROCESSES:
        return _run_two(folder)
    preset, overrides, inject = settings_of(CASES[name])
    distill(load_config(preset=preset, overrides=overrides), folder, device="cpu", inject=inject)
    return numbers_of(folder)


def _run_two(folder: Path) -> dict[str, Any]:
    preset, overrides, _inject = settings_of({"data.packing": "rows", **_BOTH})
    words = ["distill", "--preset", preset, "--out", str(folder), "--device", "cpu"]
    words += [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
    ends = process_jobs.wait_for(process_jobs.commands([words, words]))
    assert [ended.code for ended in ends] == [0, 0], ends
    return numbers_of(folder)


def make_worlds() -> None:
    """Build the models of the record once. They are committed: training them elsewhere would give other bits."""
    torch.set_num_threads(1)
    dense, moe = WORLDS["dense"], WORLDS["moe"]
    tiny.save_trained(dense / "teacher", width=48, num_layers=2)
    tiny.save_model(dense / "student", "llama", width=32, num_layers=1, seed=2)
    tiny.save_trained(moe / "teacher", "mixtral", width=32, num_layers=2, steps=60)
    tiny.save_model(moe / "student", "llama", width=24, num_layers=1, seed=2)
    for world in (dense, moe):
        tiny.save_text(world / "train.jsonl")
        for path in world.glob("*/model.safetensors"):
            halved = {name: tensor.half() for name, tensor in load_file(path).items()}
            save_file(halved, path, metadata={"format": "pt"})


def main() -> None:
    """Run every case and write the record; build the models first where they are missing."""
    if not all(world.exists() for world in WORLDS.values()):
        make_worlds()
    root = Path(tempfile.mkdtemp())
    cases = {name: run_case(name, root / f"run-{number}") for number, name in enumerate([*CASES, TWO_PROCESSES])}
    RECORD.write_text(json.dumps({"fingerprint": fingerprint(), "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
