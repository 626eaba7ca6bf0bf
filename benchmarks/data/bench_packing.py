"""Padding and speed of the orders of short records: as they come, grouped by length, and packed by best fit.

    python benchmarks/data/bench_packing.py

The records are drawn, not a dataset: a prompt of about 60 and an answer of about 130 tokens, log-normal, as the word
problems of GSM8K have with a vocabulary of 50,000; and the same twice as long, as a small vocabulary makes them.
`--jsonl FILE --model FOLDER` measures the padding of real records instead and writes nothing.

`padding_share` is the share of the places of all batches of an epoch that hold no token. `least_share` is a bound for
packed rows: with the fewest rows that any packing could need (Martello and Toth, 1990), all padded to their length.

Speed is that of forward and backward of a small Llama, in CPU seconds, of batches of each order in turn, so that what
else the machine does meets all of them alike. It counts tokens that are not padding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from stillroom.config.schema import DataConfig
from stillroom.core.types import Needs
from stillroom.data import Encoded, Loader, Rows, Tally, pack
from stillroom.data.corpus import encode_training
from stillroom.models.student import Student, attend_causally

RESULTS = Path(__file__).parent / "results"
NUM_RECORDS = 7_473
MAX_LENGTH, BATCH_SIZE, VOCABULARY = 512, 8, 1024
ROW_LENGTHS = (512, 1024, 2048)
SCALES = {"vocabulary of 50,000": 1, "small vocabulary": 2}
ORDERS = {"as they come": ("rows", False), "grouped by length": ("rows", True), "packed": ("packed", False)}


def drawn(scale: int = 1) -> Encoded:
    """Records with lengths of word problems, times a scale, and random tokens."""
    rng = np.random.default_rng(8)
    prompts = scale * np.clip(rng.lognormal(np.log(58), 0.36, NUM_RECORDS), 15, 250).astype(np.int64)
    answers = scale * np.clip(rng.lognormal(np.log(118), 0.45, NUM_RECORDS), 15, 480).astype(np.int64)
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
    """Of the batches of the first epoch, each padded to its longest row."""
    loader, lengths = Loader(rows, batch_size=BATCH_SIZE, groups_lengths=groups_lengths), rows.lengths
    batches = np.array_split(lengths[loader._order(0)], range(BATCH_SIZE, len(rows), BATCH_SIZE))
    num_places = sum(len(batch) * int(batch.max()) for batch in batches)
    share = 1 - int(lengths.sum()) / num_places
    return {"rows": len(rows), "batches": len(batches), "padding_share": round(share, 4)}


def least_padding(lengths: npt.NDArray[np.int64], capacity: int) -> float:
    """Padding of the fewest rows that any packing could need, by the bound L2 of Martello and Toth."""
    sizes = np.minimum(lengths - 1, capacity)
    fewest = 0
    for small in range(capacity // 2 + 1):
        alone, large = sizes > capacity - small, (sizes > capacity // 2) & (sizes <= capacity - small)
        others = sizes[(sizes >= small) & (sizes <= capacity // 2)].sum()
        left = large.sum() * capacity - sizes[large].sum()
        fewest = max(fewest, int(alone.sum() + large.sum() + max(0, -(-(others - left) // capacity))))
    return round(max(0.0, 1 - float(sizes.sum()) / (fewest * capacity)), 4)


def speeds(orders: dict[str, tuple[Rows, bool]], num_tokens: int, num_rounds: int) -> dict[str, list[int]]:
    """Tokens a CPU second of each order in each round. The first round is not counted."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=MAX_LENGTH,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    attend_causally(model)
    student = Student(model, vocab_size=VOCABULARY, is_described=True)
    loaders = {
        name: Loader(rows, batch_size=BATCH_SIZE, groups_lengths=groups) for name, (rows, groups) in orders.items()
    }
    windows, found = dict.fromkeys(orders, 0), {name: list[int]() for name in orders}
    for number in range(num_rounds + 1):
        for name, loader in loaders.items():
            count, begun = 0, time.process_time()
            while count < num_tokens:
                [batch] = loader.window(windows[name])
                windows[name] += 1
                view = student.observe(batch, Needs())
                torch.nn.functional.cross_entropy(view.hidden @ view.head.weight.T, batch.scored_targets).backward()
                count += int(batch.attention_mask.sum())
            if number:
                found[name].append(round(count / (time.process_time() - begun)))
    return found


def packed(encoded: Encoded, packing: Any, max_length: int) -> Rows:
    return pack(encoded, packing, max_length, Tally())


def paddings(encoded: Encoded, max_length: int) -> dict[str, Any]:
    """The padding of each order with rows of a length."""
    lengths = np.diff(encoded.bounds)
    orders = {name: padding(packed(encoded, kind, max_length), groups) for name, (kind, groups) in ORDERS.items()}
    return {
        "max_length": max_length,
        "tokens_of_a_record": {"mean": round(float(lengths.mean()), 1), "longest": int(lengths.max())},
        "records_cut": int((lengths > max_length + 1).sum()),
        "orders": orders,
        "packed_least_share": least_padding(lengths, max_length),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jsonl")
    parser.add_argument("--model")
    parser.add_argument("--max-length", type=int, default=MAX_LENGTH, help="of real records")
    parser.add_argument("--tokens", type=int, default=6_000, help="of one order in one round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.jsonl:
        from transformers import AutoTokenizer

        config = DataConfig(train=options.jsonl, packing="rows")
        encoded = encode_training(config, AutoTokenizer.from_pretrained(options.model))[0]
        print(json.dumps(paddings(encoded, options.max_length), indent=1))
        return
    tables = {name: [paddings(drawn(scale), length) for length in ROW_LENGTHS] for name, scale in SCALES.items()}
    encoded = drawn()
    made = {name: (packed(encoded, kind, MAX_LENGTH), groups) for name, (kind, groups) in ORDERS.items()}
    speed = speeds(made, options.tokens, options.rounds)
    result = {
        "records": NUM_RECORDS,
        "batch_size": BATCH_SIZE,
        "padding": tables,
        "speed": {
            "max_length": MAX_LENGTH,
            "tokens_per_cpu_second": {
                name: {"median": round(statistics.median(rates)), "rounds": rates} for name, rates in speed.items()
            },
        },
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
