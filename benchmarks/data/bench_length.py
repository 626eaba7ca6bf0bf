"""Memory of one training step with rows of 1,024, 4,096 and 8,192 tokens, with and without gradient checkpointing.

    python benchmarks/data/bench_length.py

Each line is a process of its own with a small Llama, one row, forward and backward through the fused head. `packed`
rows hold texts of about 200 tokens and need a mask of length x length bytes. The peak is that of the resident set
beyond what it was before the step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
VOCABULARY = 8192
TEXT = 200
SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4}


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(length: int, is_checkpointed: bool, is_packed: bool) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from stillroom.core.types import Batch, Needs
    from stillroom.losses.head.loss import score_head
    from stillroom.models.student import Student, attend_causally

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=length, num_key_value_heads=2, **SHAPE)
    model = AutoModelForCausalLM.from_config(config)
    attend_causally(model)
    model.train()
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    student = Student(model, vocab_size=VOCABULARY, is_described=True)
    ids = torch.randint(2, VOCABULARY, (1, length + 1))
    ones = torch.ones(1, length, dtype=torch.long)
    segments = (torch.arange(length) // TEXT).unsqueeze(0) if is_packed else None
    batch = Batch(ids[:, :-1], ones, ids[:, 1:], ones, ("row",), segments=segments)
    peak, is_done = [resident_mb()], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.005):
            peak[0] = max(peak[0], resident_mb())

    before = resident_mb()
    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.process_time()
    view = student.observe(batch, Needs())
    scored = score_head(
        view, None, batch.scored_targets, kd_weight=0.0, ce_weight=1.0 / length, divergence=None, chunk_tokens=256
    )
    scored.loss.backward()
    seconds = time.process_time() - begun
    is_done.set()
    watcher.join()
    return {
        "length": length,
        "checkpointing": is_checkpointed,
        "packed": is_packed,
        "step_mb": round(peak[0] - before),
        "cpu_seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", nargs=3, type=int)
    options = parser.parse_args()
    if options.one:
        sys.stdout.write(json.dumps(measure(options.one[0], bool(options.one[1]), bool(options.one[2]))) + "\n")
        return
    lines = []
    for length in (1024, 4096, 8192):
        for is_checkpointed, is_packed in ((0, 0), (1, 0), (1, 1)):
            command = [sys.executable, __file__, "--one", str(length), str(is_checkpointed), str(is_packed)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            lines.append(json.loads(done.stdout))
            print(done.stdout, end="", flush=True)
    import torch
    import transformers

    result = {
        "model": {"vocab_size": VOCABULARY, "dtype": "float32", **SHAPE},
        "text_tokens_of_packed_rows": TEXT,
        "steps": lines,
        "machine": {
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "length.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
