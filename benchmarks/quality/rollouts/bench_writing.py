"""Tokens a CPU second of the writer (`models/writer.py`) and of `transformers.generate`, and whether their texts agree.

python benchmarks/quality/rollouts/bench_writing.py MODEL [--rows 16] [--tokens 32] [--repeats 5]

MODEL is a folder or a GGUF file. Both write greedily from the same padded prompts, in turns, on one thread; the figure
is the median over turns of the ratio of CPU seconds, so that other work on the machine meets both alike. The writer's
log-probabilities are part of its time. It cuts loops, which `generate` writes on; the comparison writes them too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from stillroom.config.schema import TeacherConfig
from stillroom.data import prompt_ids
from stillroom.models import open_teacher
from stillroom.models.generate import ability_of
from stillroom.models.writer import write_rows
from stillroom.training.run_folder import machine, versions

RESULT = Path(__file__).parent / "results" / "writing.json"
LEAST = 0.9  # of transformers.generate's tokens a second
QUESTIONS = (
    "What is the capital of France?", "Write a short poem about rain.", "Why is the sky blue?",
    "Explain what a prime number is, with an example.", "Name three fruits.", "How do bees make honey?",
    "Give me a recipe for bread.", "Who was Ada Lovelace?",
)  # fmt: skip


def by_library(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """`transformers.generate` as its users call it: left padding, a cache, and no end token, so that all rows go on."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, use_cache=True)
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.no_grad():
            found = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    finally:
        model.generation_config = own
    return [row.tolist() for row in found[:, longest:]]


def by_writer(model: Any, prompts: list[list[int]], num_tokens: int, vocabulary: int) -> list[list[int]]:
    rows = write_rows(
        model, prompts, list(range(len(prompts))), ends=(), num_tokens=vocabulary, max_new_tokens=num_tokens,
        temperature=0.0, cuts_loops=False,
    )  # fmt: skip
    return [row.ids for row in rows]


def measure(name: str, num_rows: int, num_tokens: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    loaded = open_teacher(TeacherConfig(model=name), torch.float32)
    model, tokenizer = loaded.network, loaded.tokenizer
    model.set_attn_implementation("sdpa")  # what a model computes in training may not see the padding's mask
    prompts = [prompt_ids(tokenizer, QUESTIONS[place % len(QUESTIONS)])[0] for place in range(num_rows)]
    ability_of(model)  # tried once in a process
    vocabulary = len(tokenizer)
    ways = {
        "generate": lambda: by_library(model, prompts, num_tokens),
        "writer": lambda: by_writer(model, prompts, num_tokens, vocabulary),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    texts: dict[str, list[list[int]]] = {}
    for turn in range(repeats + 1):
        for way in list(ways) if turn % 2 else list(reversed(ways)):
            began = time.process_time()
            texts[way] = ways[way]()
            if turn:  # the first warms up
                seconds[way].append(time.process_time() - began)
    ratios = [one / other for one, other in zip(seconds["generate"], seconds["writer"], strict=True)]
    count = num_rows * num_tokens
    share = statistics.median(ratios)
    return {
        "model": Path(name).name,
        "rows": num_rows,
        "tokens_each": num_tokens,
        "tokens_per_cpu_second": {way: round(count / statistics.median(spent), 1) for way, spent in seconds.items()},
        "writer_over_generate": round(share, 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "least": LEAST,
        "is_met": share >= LEAST,
        "equal_rows": sum(one == other for one, other in zip(texts["generate"], texts["writer"], strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    for name, value in (("rows", 16), ("tokens", 32), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    found = measure(given.model, given.rows, given.tokens, given.repeats)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"machine": machine(), "versions": versions(), **found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
