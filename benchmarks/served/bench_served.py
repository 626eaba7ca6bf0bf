"""A teacher on llama.cpp's own server beside the same teacher on this machine: how near its answers are, how fast.

    pip install xllamacpp                                                # brings llama.cpp's server
    python benchmarks/served/bench_served.py MODEL --data text.txt       # MODEL: a folder or a GGUF file

The model is exported to GGUF in F32 and served by one thread, with F32 keys and values and no flash attention
(`exact`), and as the server is by default (`default`). For each:

`answers`   rows of the text asked by our shape `llama.cpp`, and computed by our own forward in F32: the largest
            difference of a log-probability among the K likeliest, that of the tokens that came, and how many of the
            likeliest are the same token at the same rank. Positions a second by one row at a time and by all slots.
`cache`     `stillroom cache` from the server and from the model here.
`run`       the same student, cut from the teacher to half its layers, trained live with the server and with the
            teacher here: the losses of each step.

Everything on a CPU, one thread for the server and one for us, on the same machine.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "tests" / "support"))

import real_llama  # noqa: E402

from stillroom import __version__  # noqa: E402
from stillroom.config import load_config  # noqa: E402
from stillroom.config.schema import TeacherConfig  # noqa: E402
from stillroom.export.folder import export  # noqa: E402
from stillroom.models import open_teacher  # noqa: E402
from stillroom.teachers.served.teacher import Server, open_server  # noqa: E402
from stillroom.telemetry import read_events  # noqa: E402
from stillroom.training.distill import distill  # noqa: E402
from stillroom.training.write_cache import make_cache  # noqa: E402

K, SLOTS, LENGTH = 20, 4, 96
RECORD_CHARACTERS = 300


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, hub id or GGUF file")
    parser.add_argument("--data", type=Path, required=True, help="a text file")
    parser.add_argument("--records", type=int, default=64, help=f"pieces of {RECORD_CHARACTERS} characters")
    parser.add_argument("--rows", type=int, default=8, help="of the part `answers`")
    parser.add_argument("--steps", type=int, default=8, help="of the run")
    parser.add_argument("--name", help="of the result; else that of the model")
    return parser.parse_args()


def main() -> None:
    wanted = arguments()
    torch.set_num_threads(1)
    name = wanted.name or Path(wanted.model).stem
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = save_records(wanted.data, folder / "text.jsonl", wanted.records)
        export(wanted.model, folder / name, format="gguf", form="float32")
        found = {**about(), "model": name, "data": wanted.data.name, "records": wanted.records, "k": K}
        found["here"] = here(wanted, data, folder)
        for kind, is_exact in (("exact", True), ("default", False)):
            file = folder / name / "model-float32.gguf"
            with real_llama.serving_file(file, num_slots=SLOTS, context=SLOTS * 512, is_exact=is_exact) as url:
                found[kind] = there(wanted, data, folder / kind, url, found["here"]["losses"])
    place_of = HERE / "results" / f"{name}.json"
    place_of.parent.mkdir(exist_ok=True)
    place_of.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


def about() -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "gguf")}
    try:
        versions["xllamacpp"] = importlib.metadata.version("xllamacpp")
    except importlib.metadata.PackageNotFoundError:  # on the path without its metadata
        import xllamacpp

        versions["xllamacpp"] = xllamacpp.__version__
    return {
        "script": "benchmarks/served/bench_served.py",
        "date": datetime.date.today().isoformat(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": {"server": 1, "here": 1},
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), "stillroom": __version__, **versions},
    }


def save_records(text: Path, place: Path, count: int) -> Path:
    held = text.read_text(encoding="utf-8")[: count * RECORD_CHARACTERS]
    pieces = [held[begin : begin + RECORD_CHARACTERS] for begin in range(0, len(held), RECORD_CHARACTERS)]
    place.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces), encoding="utf-8")
    return place


def settings(wanted: argparse.Namespace, data: Path, **over: Any) -> Any:
    chosen = {
        "teacher.model": wanted.model,
        "data.train": str(data),
        "data.max_length": LENGTH,
        "data.packing": "rows",
        "train.max_steps": wanted.steps,
        "train.batch_size": 4,
        "train.gradient_accumulation_steps": 1,
        "train.eval_steps": wanted.steps,
        "eval.samples": 0,
        "precision.mode": "fp32",
        "teacher.signal.kind": "top_k",
        "teacher.signal.k": K,
        "teacher.dtype": "float32",
        **over,
    }
    return load_config(overrides=chosen)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    return work(), time.perf_counter() - begun


def losses(folder: Path) -> list[float]:
    return [event["train_loss"] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def here(wanted: argparse.Namespace, data: Path, folder: Path) -> dict[str, Any]:
    """The student, and a cache and a run of the teacher on this machine."""
    layers = open_teacher(settings(wanted, data).teacher, torch.float32).network.config.num_hidden_layers
    cut = {"student.init": "shrink", "student.shrink.layers": max(1, layers // 2), "train.max_steps": 1}
    distill(settings(wanted, data, **cut), folder / "cut", device="cpu")
    made, seconds = timed(lambda: make_cache(settings(wanted, data), folder / "cache here", device="cpu"))
    distill(settings(wanted, data, **student(folder)), folder / "run here", device="cpu")
    return {
        "cache": {"positions": made["positions"], "positions_a_second": round(made["positions"] / seconds, 1)},
        "losses": losses(folder / "run here"),
    }


def student(folder: Path) -> dict[str, Any]:
    return {"student.model": str(folder / "cut" / "student"), "student.init": "pretrained"}


def there(wanted: argparse.Namespace, data: Path, folder: Path, url: str, losses_here: list[float]) -> dict[str, Any]:
    over = {"teacher.server": url, "teacher.requests.concurrency": SLOTS}
    answers = compare(wanted, data, url)
    made, seconds = timed(lambda: make_cache(settings(wanted, data, **over), folder / "cache", device="cpu"))
    _, run_seconds = timed(
        lambda: distill(settings(wanted, data, **over, **student(folder.parent)), folder / "run", device="cpu")
    )
    found = losses(folder / "run")
    gaps = [abs(one - other) for one, other in zip(found, losses_here, strict=True)]
    summary = json.loads((folder / "run" / "summary.json").read_bytes())
    return {
        "answers": answers,
        "cache": {"positions": made["positions"], "positions_a_second": round(made["positions"] / seconds, 1)},
        "run": {
            "losses": found,
            "largest_difference_of_a_loss": max(gaps),
            "seconds": round(run_seconds, 1),
            "server": summary["teacher_server"],
        },
    }


def compare(wanted: argparse.Namespace, data: Path, url: str) -> dict[str, Any]:
    """Rows of the text, asked and computed."""
    loaded = open_teacher(settings(wanted, data).teacher, torch.float32)
    network, words = loaded.network.eval(), loaded.tokenizer
    section = TeacherConfig.model_validate({"model": wanted.model, "server": url})
    server = open_server(section, words, num_wanted=K, vocab_size=len(words))
    texts = [json.loads(line)["text"] for line in data.read_text(encoding="utf-8").splitlines()][: wanted.rows]
    rows = [words(text)["input_ids"][:LENGTH] for text in texts]
    given, alone = timed(lambda: [server.score(row) for row in rows])
    with ThreadPoolExecutor(SLOTS) as pool:
        _, together = timed(lambda: list(pool.map(server.score, rows)))
    positions = sum(len(one.entries) for one in given)
    return {
        "rows": len(rows),
        "positions": positions,
        "positions_a_second": {"one row": round(positions / alone, 1), "all slots": round(positions / together, 1)},
        **differences(network, rows, given, server),
    }


@torch.no_grad()
def differences(network: Any, rows: list[list[int]], given: list[Any], server: Server) -> dict[str, Any]:
    top = own = 0.0
    same = total = 0
    for row, one in zip(rows, given, strict=True):
        log_probs = torch.log_softmax(network(torch.tensor([row])).logits[0].float(), -1)
        for place, entry in one.entries.items():
            ours = log_probs[place - 1]
            ranked = sorted(entry, key=lambda token: -entry[token])[:K]
            top = max(top, *(abs(entry[token] - float(ours[token])) for token in ranked))
            own = max(own, abs(entry[row[place]] - float(ours[row[place]])))
            same += sum(a == b for a, b in zip(ranked, ours.topk(K).indices.tolist(), strict=True))
            total += K
    return {
        "largest_difference_among_the_likeliest": top,
        "largest_difference_of_the_tokens_that_came": own,
        "share_of_same_tokens_at_same_ranks": same / total,
    }


if __name__ == "__main__":
    main()
