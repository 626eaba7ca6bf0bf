"""Tokens a second of our generation against that of transformers, on a student of the shape of SmolLM2-135M.

    python benchmarks/generation/bench_generation.py

Both write greedily from the same weights (drawn at random: the time does not depend on them) and the same prompts, in
one process, taking turns; ours also turns tokens into text, as for a person who waits. CPU seconds of the process are
compared, not the clock: others may use the machine. They still move with what others do to the caches, so the ratio is
the median over pairs of neighbouring turns, with its quartiles. That both write the same tokens is a law of
tests/models/test_decoding.py.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "head"))
from measure import machine

from stillroom import builtin
from stillroom.models.attention import attend_causally
from stillroom.models.generate import stream
from stillroom.models.load.quiet import quiet_transformers

RESULTS = Path(__file__).with_name("results") / "generation.json"
SHAPE = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1_536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8_192, "tie_word_embeddings": True,
}  # fmt: skip
CASES = {"one prompt": [64], "four prompts": [64, 48, 64, 20]}
NEW, ROUNDS = 32, 15


class Words:
    """A tokenizer of the builtin models whose vocabulary is that of the shape: ids above its own repeat it."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        self._own = AutoTokenizer.from_pretrained(str(builtin.model_path("teacher")))
        self.eos_token_id, self.bos_token_id, self.all_special_ids = None, None, ()
        self.added_tokens_decoder: dict[int, Any] = {}

    def __len__(self) -> int:
        return int(SHAPE["vocab_size"])

    def decode(self, ids: list[int], **options: Any) -> str:
        return str(self._own.decode([number % len(self._own) for number in ids], **options))


def ours(model: Any, words: Words, prompts: list[list[int]]) -> int:
    return sum(1 for _ in stream(model, words, prompts, max_new_tokens=NEW))


def theirs(model: Any, prompts: list[list[int]]) -> Any:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)


def cpu_seconds(work: Any, *arguments: Any) -> float:
    began = time.process_time()
    work(*arguments)
    return time.process_time() - began


def main() -> None:
    started = machine()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval()
    plain.generation_config.eos_token_id = None
    loaded = AutoModelForCausalLM.from_config(plain.config).eval()
    for one, other in zip(loaded.parameters(), plain.parameters(), strict=True):
        one.data = other.data  # the same memory on both sides
    loaded.generation_config.eos_token_id = None
    attend_causally(loaded)  # as each model that we load
    words, generator = Words(), torch.Generator().manual_seed(1)
    cases = {}
    for name, lengths in CASES.items():
        prompts = [torch.randint(49_152, (length,), generator=generator).tolist() for length in lengths]
        ours(loaded, words, prompts), theirs(plain, prompts)  # warm
        seconds: dict[str, list[float]] = {"ours": [], "transformers": []}
        for number in range(ROUNDS):
            turns = [("ours", ours, (loaded, words, prompts)), ("transformers", theirs, (plain, prompts))]
            for side, work, arguments in turns if number % 2 == 0 else reversed(turns):
                seconds[side].append(cpu_seconds(work, *arguments))
        medians = {side: statistics.median(values) for side, values in seconds.items()}
        ratios = [theirs_ / ours_ for ours_, theirs_ in zip(seconds["ours"], seconds["transformers"], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        cases[name] = {
            "prompt_tokens": lengths,
            "new_tokens": NEW,
            "cpu_seconds": seconds,
            "tokens_per_cpu_second": {side: NEW * len(lengths) / value for side, value in medians.items()},
            "ratio": quartiles[1],
            "ratio_quartiles": [quartiles[0], quartiles[2]],
        }
        print(name, cases[name]["tokens_per_cpu_second"], [f"{quartile:.3f}" for quartile in quartiles])
    result = {
        "benchmark": "generation",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": started,
        "threads": 1,
        "shape": SHAPE,
        "cases": cases,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with quiet_transformers():
        main()
