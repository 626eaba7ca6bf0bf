"""What this machine makes of a distillation, for someone who has the card that we do not.

    python scripts/gpu_report.py                          # everything, about ten minutes on a T4
    python scripts/gpu_report.py --json report.json       # the same as a file, to send
    python scripts/gpu_report.py --modes fp16-mixed --steps 5 --sizes demo

Prints versions and the card, then runs a short distillation in each precision, each in a process of its own: the
embedded demo, whose losses are compared with FP32 on the CPU, and random models of the size of SmolLM2-135M and 81M,
whose seconds and memory are what benchmarks/gpu models. Nothing is downloaded and nothing is sent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

MODES = ("auto", "fp32", "bf16-mixed", "fp16-mixed", "fp16-master", "fp16-split", "fp16-sr")
SIZES = ("demo", "135M")
PACKAGES = ("stillroom", "torch", "triton", "transformers", "accelerate", "numpy")
_MARK = "gpu report: "
_ROWS, _LENGTH, _WORDS = 4, 512, 49_152


@dataclass
class Finding:
    """One run: what was asked, and what came of it."""

    size: str
    mode: str
    device: str
    precision: str = ""  # what was chosen, and why
    seconds_a_step: float | None = None
    tokens_a_second: float | None = None
    peak_allocated_gb: float | None = None
    peak_reserved_gb: float | None = None
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    retried: int = 0
    notes: list[str] = field(default_factory=list)
    end: str = ""  # how the run ended, where it did not just finish


def machine() -> dict[str, Any]:
    """Versions, and the card as torch sees it."""
    import torch

    found: dict[str, Any] = {"system": platform.platform(), "python": platform.python_version()}
    found["versions"] = {name: _version(name) for name in PACKAGES}
    found["cuda_of_torch"], found["cpu_cores"] = torch.version.cuda, os.cpu_count()
    found["cards"] = [_card(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if found["cards"]:
        found["built_for"], found["cudnn"] = torch.cuda.get_arch_list(), torch.backends.cudnn.version()
    return found


def _card(index: int) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": torch.cuda.get_device_name(index),
        "capability": list(torch.cuda.get_device_capability(index)),
        "memory_gb": total / 1e9,
        "free_gb": free / 1e9,
        "processors": properties.multi_processor_count,
        "native_bf16": torch.cuda.is_bf16_supported(including_emulation=False),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


# -- one run -------------------------------------------------------------------------------------------------------


def run_once(size: str, mode: str, device: str, steps: int) -> Finding:
    """A short distillation in this process. A bad end is a finding like any other."""
    import torch

    from stillroom.config import load_config
    from stillroom.core.errors import StillroomError
    from stillroom.telemetry import read_events
    from stillroom.training.distill import distill

    finding = Finding(size, mode, device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        over = {"train.max_steps": steps, "train.eval_steps": steps, "train.save_steps": 10 * steps,
                "telemetry.log_steps": 1, "eval.max_batches": 2, "eval.samples": 0, "precision.mode": mode}  # fmt: skip
        over |= _demo() if size == "demo" else _models(folder)
        try:
            config = load_config(preset="demo", overrides=over)
            summary = distill(config, folder / "run", device=device).summary
            finding.skipped, finding.retried = summary["skipped"], summary["retried"]
        except (StillroomError, RuntimeError) as error:  # torch's out of memory is a RuntimeError
            finding.end = f"{type(error).__name__}: {error}"[:500]
        log = folder / "run" / "events.jsonl"
        _read(finding, read_events(log) if log.exists() else [])
    if torch.cuda.is_available() and device != "cpu":
        finding.peak_allocated_gb = torch.cuda.max_memory_allocated() / 1e9
        finding.peak_reserved_gb = torch.cuda.max_memory_reserved() / 1e9
    return finding


def _read(finding: Finding, events: list[dict[str, Any]]) -> None:
    taken = [event for event in events if event["event"] == "step"]
    finding.losses = [round(event["train_loss"], 6) for event in taken if event["train_loss"] is not None]
    timed = taken[len(taken) // 2 :]  # the first ones choose kernels and fill the allocator
    if timed:
        finding.seconds_a_step = median(event["seconds"] for event in timed)
        finding.tokens_a_second = median(event["tokens_per_second"] for event in timed)
    finding.notes = [event["text"] for event in events if event["event"] == "note"]
    starts = [event for event in events if event["event"] == "run_start"]
    if starts:
        finding.precision = json.dumps(starts[0].get("precision"))


def _demo() -> dict[str, Any]:
    return {"data.train_share": 0.01}


def _models(folder: Path) -> dict[str, Any]:
    """Random models of the sizes that benchmarks/gpu models, and random text, saved as a user would have them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(_WORDS)}, unk_token="t1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0", pad_token="t1", unk_token="t1")
    for name, layers in (("teacher", 30), ("student", 15)):
        config = LlamaConfig(
            vocab_size=_WORDS, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers,
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
            bos_token_id=0, eos_token_id=0, pad_token_id=1,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rng = random.Random(0)
    text = [" ".join(f"t{rng.randrange(2, _WORDS)}" for _ in range(_LENGTH + 1)) for _ in range(16 * _ROWS)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text))
    return {
        "teacher.model": str(folder / "teacher"), "student.model": str(folder / "student"), "data.train_share": 1.0,
        "data.train": str(folder / "train.jsonl"), "data.max_length": _LENGTH, "train.batch_size": _ROWS,
        "train.learning_rate": 1e-4, "data.eval_share": 0.1,
    }  # fmt: skip


# -- all runs ------------------------------------------------------------------------------------------------------


def apart(size: str, mode: str, device: str, steps: int) -> Finding:
    """A run in a process of its own: one that dies takes no other with it, and memory begins at nothing."""
    command = [sys.executable, __file__, "--one", f"{size},{mode},{device},{steps}"]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return Finding(**json.loads(line.removeprefix(_MARK)))
    last = done.stderr.strip().splitlines()[-1:] or ["nothing was said"]
    return Finding(size, mode, device, end=f"the process ended with {done.returncode}: {last[0][:400]}")


def furthest(losses: list[float], reference: list[float]) -> float | None:
    """The largest difference of a loss from the reference's, as a share of it."""
    pairs = list(zip(losses, reference, strict=False))
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs) if pairs else None


def table(findings: list[Finding], reference: list[float]) -> str:
    widths = {"s a step": 9, "tokens/s": 9, "peak GB": 8, "reserved": 8, "skipped": 7, "retried": 7, "loss differs": 12}
    titles = " ".join(f"{title:>{width}s}" for title, width in widths.items())
    lines = [f"{'size':6s} {'mode':12s} {'device':7s} {titles}  end"]
    for one in findings:
        apart_by = furthest(one.losses, reference) if one.size == "demo" and one.device != "cpu" else None
        cells = [
            _number(one.seconds_a_step, 9, 4), _number(one.tokens_a_second, 9, 0), _number(one.peak_allocated_gb, 8, 2),
            _number(one.peak_reserved_gb, 8, 2), f"{one.skipped:7d}", f"{one.retried:7d}", _number(apart_by, 12, 6),
        ]  # fmt: skip
        lines.append(f"{one.size:6s} {one.mode:12s} {one.device:7s} {' '.join(cells)}  {one.end or 'finished'}")
    return "\n".join(lines)


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}s}" if value is None else f"{value:{width}.{digits}f}"


def modes_for(machine_facts: dict[str, Any], asked: list[str]) -> list[str]:
    """bf16-mixed is for cards that have it; it is refused elsewhere, and that is tested without a card."""
    has_bf16 = not machine_facts["cards"] or machine_facts["cards"][0]["native_bf16"]
    return [mode for mode in asked if mode != "bf16-mixed" or has_bf16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1; auto takes a GPU where there is one")
    parser.add_argument("--modes", default=",".join(MODES), help="precisions, with commas")
    parser.add_argument("--sizes", default="", help="demo, 135M; both on a GPU, else the demo alone")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a run")
    parser.add_argument("--json", type=Path, help="write everything to this file, to send")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        size, mode, device, steps = options.one.split(",")
        print(_MARK + json.dumps(asdict(run_once(size, mode, device, int(steps)))), flush=True)
        return
    facts = machine()
    print(json.dumps(facts, indent=1))
    has_card = bool(facts["cards"]) and options.device != "cpu"
    device = options.device if options.device != "auto" else "cuda" if has_card else "cpu"
    sizes = options.sizes.split(",") if options.sizes else list(SIZES if has_card else SIZES[:1])
    first = apart("demo", "fp32", "cpu", options.steps)
    findings = [first]
    for size in sizes:
        for mode in modes_for(facts, options.modes.split(",")):
            findings.append(apart(size, mode, device, options.steps))
            print(table(findings[-1:], first.losses).splitlines()[-1], flush=True)
    print("\n" + table(findings, first.losses))
    notes = {note for finding in findings for note in finding.notes}
    print("\n" + "\n".join(f"note: {note}" for note in sorted(notes)))
    if options.json:
        options.json.write_text(
            json.dumps({"machine": facts, "runs": [asdict(one) for one in findings]}, indent=1) + "\n"
        )
        print(f"written: {options.json}")


if __name__ == "__main__":
    main()
