"""The token store on many short lines: time, rate and memory of the first start and of the second.

    python benchmarks/data/bench_store.py --lines 10000000
    python benchmarks/data/bench_store.py --lines 100000 --repeat 100
    python benchmarks/data/bench_store.py --lines 10000000 --folder FOLDER

Lines are drawn from a seeded generator and tokenized by a byte-level BPE trained on the first of them. Each start is a
process of its own: it opens the data, makes a loader and takes ten windows. Memory is read from /proc: the peak of the
resident set (with the mapped pages that were touched) and what is anonymous at the end.

`--repeat` is for a busy machine: the lines are tokenized once, and then the entry of a file that repeats them is made
of copies of their arrays, each document with its own digest. The starts after that open an entry of the full size; only
the rate of tokenizing is that of the short file.

`--folder` keeps the lines, the store and what the first start measured, so that only the later starts are measured
again. The load of the machine stands beside each start: seconds of the clock mean little on a busy one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
NUM_WORDS = 4_000
WORDS_PER_LINE = (4, 14)


def words(rng: random.Random) -> list[str]:
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    return ["".join(rng.choices(letters, range(26, 0, -1), k=rng.randint(2, 9))) for _ in range(NUM_WORDS)]


def write_lines(path: Path, count: int) -> None:
    rng = random.Random(17)
    known = words(rng)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = " ".join(rng.choices(known, k=rng.randint(*WORDS_PER_LINE)))
            file.write(f'{{"text": "{text} {number}."}}\n')


def make_tokenizer(path: Path, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    with path.open(encoding="utf-8") as file:
        sample = [json.loads(line)["text"] for line, _ in zip(file, range(20_000), strict=False)]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8_000, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(sample, trainer)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(folder)


def start(path: str, cache: str, tokenizer: str, packing: str) -> None:
    """One start, in a process of its own. Print what was measured."""
    from transformers import AutoTokenizer

    from stillroom.config.schema import DataConfig
    from stillroom.data import Loader, open_data

    read = AutoTokenizer.from_pretrained(tokenizer)
    base, load = memory(), os.getloadavg()[0]
    begun, cpu_begun, told = time.monotonic(), time.process_time(), []
    config: Any = {"train": path, "cache": cache, "packing": packing}
    corpus = open_data(DataConfig(**config), read, tell=told.append)
    opened, cpu_opened = time.monotonic() - begun, time.process_time() - cpu_begun
    loader = Loader(corpus.train, batch_size=32, seed=1)
    begun = time.monotonic()
    for window in range(10):
        loader.window(window * 1009 % loader.num_windows)
    answer = {
        "packing": packing,
        "open_seconds": round(opened, 2),
        "open_cpu_seconds": round(cpu_opened, 2),
        "ten_windows_seconds": round(time.monotonic() - begun, 2),
        "cpu_seconds": round(time.process_time(), 2),
        "cpu_seconds_of_children": round(sum(os.times()[2:4]), 2),
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
        "before_mb": base,
        "after_mb": memory(),
        "told": told[-1:],
        "counters": {name: corpus.counters[name] for name in ("records", "train_tokens", "eval_documents")},
        "rows": len(corpus.train),
    }
    sys.stdout.write(json.dumps(answer) + "\n")


def repeat(path: Path, big: Path, cache: Path, tokenizer: str, times: int) -> None:
    """Write a file that repeats another, and its entry in the store."""
    from transformers import AutoTokenizer

    from stillroom.config.schema import DataConfig
    from stillroom.core.files import sum_of_file
    from stillroom.data.store import MANIFEST, entry_key, tokenizer_digest

    contents = path.read_bytes()
    with big.open("wb") as file:
        for _ in range(times):
            file.write(contents)
    digest = tokenizer_digest(AutoTokenizer.from_pretrained(tokenizer))
    assert digest is not None
    key = entry_key(sum_of_file(big).sha256, name=big.name, variant="", tokenizer=digest, config=DataConfig())
    (small,) = (found.parent for found in cache.glob(f"*/*/{MANIFEST}"))
    entry = cache / key[:2] / key
    entry.mkdir(parents=True)
    manifest = json.loads((small / MANIFEST).read_bytes().partition(b"\n")[0])
    rng = np.random.default_rng(3)
    for name, array in manifest["arrays"].items():
        values = np.fromfile(small / f"{name}.bin", array["dtype"])
        with (entry / f"{name}.bin").open("wb") as file:
            for number in range(times):
                if name in ("digests", "share_hashes"):
                    file.write(rng.bytes(values.nbytes))
                elif name == "name_ends":
                    file.write((values + number * values[-1]).tobytes())
                else:
                    file.write(values.tobytes())
        array["sha256"] = sum_of_file(entry / f"{name}.bin").sha256
    text = json.dumps({**manifest, "key": key, "of": big.name}).encode()
    (entry / MANIFEST).write_bytes(text + b"\n" + hashlib.sha256(text).hexdigest().encode() + b"\n")


def memory() -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"peak": "VmHWM", "now": "VmRSS", "anonymous": "RssAnon", "mapped": "RssFile"}
    return {name: int(lines[key].split()[0]) // 1024 for name, key in names.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--folder")
    parser.add_argument("--start", nargs=4)
    options = parser.parse_args()
    if options.start:
        start(*options.start)
        return
    with contextlib.ExitStack() as stack:
        folder = Path(
            options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-store-"))
        ).absolute()
        result = measure(folder, options.lines, options.repeat)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "store.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(folder: Path, num_lines: int, num_repeats: int) -> dict[str, Any]:
    lines, tokenizer, first = folder / "lines.jsonl", folder / "tokenizer", folder / "first.json"
    if not first.exists():
        folder.mkdir(exist_ok=True)
        write_lines(lines, num_lines)
        make_tokenizer(lines, tokenizer)
        first.write_text(json.dumps(started(lines, folder, "blocks")))
    starts, data = [json.loads(first.read_text())], lines
    if num_repeats > 1:
        data = folder / "repeated.jsonl"
        if not data.exists():
            repeat(lines, data, folder / "cache", str(tokenizer), num_repeats)
    starts += [started(data, folder, packing) for packing in ("blocks", "rows", "packed")]
    sizes = [path.stat().st_size for path in (folder / "cache").rglob("*.bin")]
    return {
        "lines": num_lines,
        "repeat": num_repeats,
        "file_mb": data.stat().st_size >> 20,
        "store_mb": sum(sizes) >> 20,
        "starts": starts,
        "machine": machine(),
    }


def started(data: Path, folder: Path, packing: str) -> Any:
    """A start in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--start",
        str(data),
        str(folder / "cache"),
        str(folder / "tokenizer"),
        packing,
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    return json.loads(done.stdout)


def machine() -> dict[str, Any]:
    import numpy
    import tokenizers
    import transformers

    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
        "load_average_at_end": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "tokenizers": tokenizers.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()
