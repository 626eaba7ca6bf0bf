"""Padding and speed of the orders of short records: as they come, grouped by length, and packed by best fit.

    python benchmarks/data/bench_packing.py

The records are drawn, not a dataset: a prompt of about 60 and an answer of about 130 tokens, log-normal, as the word
problems of GSM8K have with a vocabulary of 50,000. `--jsonl FILE --model FOLDER` measures the padding of real records
instead and writes nothing. Speed is that of forward and backward of a small Llama on the rows of one epoch's first
batches, counted in tokens that are not padding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from stillroom.config.schema import DataConfig
from stillroom.data import Encoded, Loader, Rows, Tally, pack
from stillroom.data.corpus import encode_training
from stillroom.models.attention import attend_causally
from stillroom.models.student import Student
from stillroom.types import Needs

RESULTS = Path(__file__).parent / "results"
NUM_RECORDS = 7_473
MAX_LENGTH, BATCH_SIZE, VOCABULARY = 512, 8, 1024
ORDERS = {"as they come": ("rows", False), "grouped by length": ("rows", True), "packed": ("packed", False)}


def drawn() -> Encoded:
    """Records with lengths of word problems and random tokens."""
    rng = np.random.default_rng(8)
    prompts = np.clip(rng.lognormal(np.log(58), 0.36, NUM_RECORDS), 15, 250).astype(np.int64)
    answers = np.clip(rng.lognormal(np.log(118), 0.45, NUM_RECORDS), 15, 480).astype(np.int64)
    bounds = np.concatenate([[0], np.cumsum(prompts + answers)])
    places = np.arange(bounds[-1]) - np.repeat(bounds[:-1], prompts + answers)
    names = tuple(f"r{number}" for number in range(NUM_RECORDS))
    return Encoded(
        ids=rng.integers(2, VOCABULARY, bounds[-1], dtype=np.int32),
        num_bytes=np.full(bounds[-1], 4, np.int32),
        is_scored=places >= np.repeat(prompts, prompts + answers),
        bounds=bounds,
        names=names,
        groups=names,
        has_prompt=np.ones(NUM_RECORDS, np.bool_),
    )


def padding(rows: Rows, groups_lengths: bool) -> dict[str, Any]:
    loader = Loader(rows, batch_size=BATCH_SIZE, groups_lengths=groups_lengths)
    num_places = num_tokens = 0
    for window in range(loader.num_windows):
        [batch] = loader.window(window)
        num_places += batch.input_ids.numel()
        num_tokens += int(batch.attention_mask.sum())
    return {"rows": len(rows), "batches": loader.num_windows, "padding_share": round(1 - num_tokens / num_places, 4)}


def speed(rows: Rows, groups_lengths: bool, num_tokens: int) -> dict[str, float]:
    """Tokens a second over batches that hold about `num_tokens`; the first batch is not counted."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=MAX_LENGTH,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    attend_causally(model)
    student = Student(model, vocab_size=VOCABULARY, is_described=True)
    loader = Loader(rows, batch_size=BATCH_SIZE, groups_lengths=groups_lengths)
    count, begun, cpu_begun = 0, 0.0, 0.0
    for window in range(loader.num_windows):
        if window == 1:
            count, begun, cpu_begun = 0, time.monotonic(), time.process_time()
        [batch] = loader.window(window)
        view = student.observe(batch, Needs())
        loss = torch.nn.functional.cross_entropy(view.hidden @ view.head.weight.T, batch.scored_targets)
        loss.backward()
        count += int(batch.attention_mask.sum())
        if window and count >= num_tokens:
            break
    seconds, cpu_seconds = time.monotonic() - begun, time.process_time() - cpu_begun
    return {"tokens_per_second": round(count / seconds), "tokens_per_cpu_second": round(count / cpu_seconds)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jsonl")
    parser.add_argument("--model")
    parser.add_argument("--max-length", type=int, default=MAX_LENGTH, help="of real records")
    parser.add_argument("--tokens", type=int, default=40_000)
    options = parser.parse_args()
    if options.jsonl:
        from transformers import AutoTokenizer

        config = DataConfig(train=options.jsonl, packing="rows")
        encoded = encode_training(config, AutoTokenizer.from_pretrained(options.model))[0]
    else:
        encoded = drawn()
    lengths = np.diff(encoded.bounds)
    max_length = options.max_length if options.jsonl else MAX_LENGTH
    orders: dict[str, Any] = {}
    for name, (packing, groups_lengths) in ORDERS.items():
        rows = pack(encoded, packing, max_length, Tally())  # type: ignore[arg-type]
        orders[name] = padding(rows, groups_lengths)
        if not options.jsonl:
            orders[name] |= speed(rows, groups_lengths, options.tokens)
        print(name, json.dumps(orders[name]), flush=True)
    if options.jsonl:
        print(f"tokens of a record: mean {lengths.mean():.0f}, longest {lengths.max()}")
        return
    result = {
        "records": len(lengths),
        "tokens_of_a_record": {"mean": round(float(lengths.mean()), 1), "longest": int(lengths.max())},
        "max_length": MAX_LENGTH,
        "batch_size": BATCH_SIZE,
        "orders": orders,
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "processor": platform.machine(),
            "load_average_at_end": [round(load, 1) for load in os.getloadavg()],
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "packing.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
