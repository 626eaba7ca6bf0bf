"""Where the CPU seconds of a short run at a real size go: a run of six steps, by phase, before and after a change.

    python benchmarks/training/phases.py MODEL --tree before=OLD/src --tree after=src

MODEL is a model of 135M parameters (SmolLM2-135M, a folder or a GGUF file). The student is its half: 15 of the 30
layers, chosen by influence. A step reads 4 rows of 256 tokens. Kinds of runs: `fixed` evaluates 4 such batches each
time, `budgeted` leaves them to the run's own budget, `dry run` is the dry run of it, `random` is the pair 360M -> 135M
with random weights of these shapes; these are in FP32. `auto` and `dry run, auto` leave the precision to the machine.
Every run is a process of one thread; CPU seconds are those of the whole process, and each second counts for the
innermost phase that is running. Writes results/phases.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULT = Path(__file__).with_name("results") / "phases.json"
_MARK = "phases: "
# A phase and the functions whose time it is. A function that a tree does not have is left out.
PHASES = {
    "loading": ["training.models:load_models"],
    "cut": ["training.models:_cut"],
    "trials": ["models.load:try_model"],
    "data": ["training.build:open_corpus"],
    "first forward": ["training.preflight:first_forward", "training.preflight:find_loss_scale"],
    "evaluations": ["training.memory:evaluate_held_out"],
    "checks": ["training.recover:check_state", "training.recover:is_sound", "training.recover:take_snapshot"],
    "checkpoints": ["training.save:save_checkpoint"],
    "student's folder": ["training.save:save_student", "training.finish:read_again"],
    "token view": ["training.finish:save_tokens"],
    "samples": ["training.finish:make_samples"],
    "steps": ["training.step:train_step"],
    "report": ["report:write_report"],
}
CHILD = """
import importlib, json, resource, sys, time
began = time.process_time()
import stillroom.cli
for name in ("training.distill", "training.finish", "report", "report.live", "models.shrink.layer_choice"):
    importlib.import_module("stillroom." + name)
spent, peaks, open_phases, last = {"imports": time.process_time() - began}, {}, [], [time.process_time()]
before_steps = []

def turn(phase):
    now = time.process_time()
    here = open_phases[-1] if open_phases else "rest"
    spent[here] = spent.get(here, 0.0) + now - last[0]
    peaks[here] = max(peaks.get(here, 0), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    last[0] = now
    if phase is None:
        open_phases.pop()
    else:
        open_phases.append(phase)

def timed(function, phase):
    def call(*args, **kwargs):
        turn(phase)
        if phase == "steps" and not before_steps:
            before_steps.append(dict(spent))
        try:
            return function(*args, **kwargs)
        finally:
            turn(None)
    return call

phases = json.loads(sys.argv[1])
for phase, places in phases.items():
    for place in places:
        module, _, name = place.partition(":")
        try:
            function = getattr(importlib.import_module("stillroom." + module), name)
        except (ImportError, AttributeError):
            continue
        wrapper = timed(function, phase)
        for one in [one for key, one in sys.modules.items() if key.startswith("stillroom")]:
            for key, value in list(vars(one).items()):
                if value is function:
                    setattr(one, key, wrapper)
code = 0
try:
    stillroom.cli.main(json.loads(sys.argv[2]))
except SystemExit as end:
    code = end.code
now = time.process_time()
spent["rest"] = spent.get("rest", 0.0) + now - last[0]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
early = before_steps[0] if before_steps else {}
print("MARK" + json.dumps({"exit_code": code, "cpu_seconds": spent, "before_first_step": early,
                           "total": sum(spent.values()), "peak_gb": peak * 1024 / 1e9,
                           "peak_gb_by_phase": {key: value * 1024 / 1e9 for key, value in peaks.items()}}))
""".replace("MARK", _MARK)

KINDS = ("fixed", "budgeted", "random", "dry run", "auto", "dry run, auto")
PAIRS = {  # layers, width, feed-forward, heads, key heads: SmolLM2-360M's and SmolLM2-135M's
    "360M": (32, 960, 2560, 15, 5),
    "135M": (30, 576, 1536, 9, 3),
}


def settings(model: str, folder: Path, kind: str) -> list[str]:
    """The command of a run; `kind` says which."""
    keys: dict[str, Any] = {"train.batch_size": 4, "data.max_length": 256}
    if "auto" not in kind:
        keys |= {"train.compile": "off", "precision.mode": "fp32"}
    if kind == "random":
        keys |= {"teacher.model": str(folder / "360M"), "student.model": str(folder / "135M")}
    else:
        keys |= {"teacher.model": model, "student.init": "shrink", "student.shrink.layers": 15}
        keys["student.shrink.method"] = "influence"
    if kind in ("fixed", "random"):
        keys["eval.max_batches"] = 4
    words = ["distill", "--preset", "base", "--data", "builtin:stdlib", "--device", "cpu", "--no-progress"]
    words += ["--dry-run"] if kind.startswith("dry run") else ["--max-steps", "6"]
    for key, value in keys.items():
        words += ["--set", f"{key}={value}"]
    return words


def write_random(model: str, folder: Path) -> None:
    """Models of the pair 360M -> 135M, with random weights and MODEL's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = Path(model)
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    tokenizer = AutoTokenizer.from_pretrained(path.parent if where else path, **where)
    for name, (layers, width, inner, heads, key_heads) in PAIRS.items():
        torch.manual_seed(len(name) + layers)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=key_heads, tie_word_embeddings=True,
            max_position_embeddings=2048,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def measured(tree: str, words: list[str], out: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(Path(tree).resolve())}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-c", CHILD, json.dumps(PHASES), json.dumps([*words, "--out", str(out)])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith(_MARK)), None)
    if line is None:
        raise SystemExit(f"the run ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
    if found["exit_code"] not in (0, None, 22):  # 22: six steps from random weights found no better student
        raise SystemExit(f"exit code {found['exit_code']}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found["before_first_step_total"] = round(
        sum(value for key, value in found["before_first_step"].items() if key not in ("loading", "cut", "imports")), 2
    )
    return {key: _rounded(value) for key, value in found.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return round(value, 2) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tree", action="append", required=True, help="NAME=SRC, the source tree to measure")
    parser.add_argument("--kind", action="append", choices=KINDS)
    wants = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if "random" in (wants.kind or []):
            write_random(wants.model, Path(scratch))
        for kind in wants.kind or ["fixed"]:
            for tree in wants.tree:
                name, _, source = tree.partition("=")
                row = measured(source, settings(wants.model, Path(scratch), kind), Path(scratch) / f"{kind}-{name}")
                row["date"] = datetime.date.today().isoformat()
                print(kind, name, json.dumps(row), flush=True)
                keep(kind, name, row)


def keep(kind: str, name: str, row: dict[str, Any]) -> None:
    """Write a row into the result file, next to those of other runs of this script."""
    found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    found.setdefault(kind, {})[name] = row
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, one thread, other programs running"
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
