"""Seconds from nothing to a finished student, for one, three and ten passes over the data.

    python benchmarks/training/epochs.py            # small and real sizes; resumes where it was ended

Each run is a process of its own that loads the models, reads the data, trains and saves: Stillroom with a teacher
that is asked once and stored (`teacher.cache = "auto"`, writing included), Stillroom with a live teacher, and trl's
GKD trainer. Contenders take turns. On a machine that others use, OMP_NUM_THREADS=1 and CPU seconds still say something.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "head"))

import torch
from measure import busy_processes, machine
from world import Size, make_world, settings

RESULTS = Path(__file__).with_name("results")
BOOK = RESULTS / "epochs.json"
_MARK = "benchmark: "
# SmolLM2-135M's shape, and the same cut to half its layers.
REAL = Size(49_152, 256, 4, teacher_layers=30, teacher_width=576, student_layers=15, student_width=576, is_tied=True)
SIZES = {"small": (Size(), 12), "135M to 81M": (REAL, 6)}  # with full batches in a pass
PASSES = (("small", 1), ("small", 3), ("135M to 81M", 1), ("135M to 81M", 3), ("small", 10))
LIVE, CACHED, PEER = "stillroom, live", "stillroom, cached", "trl GKD trainer, forward KL (beta 0)"


def _stillroom(folder: Path, size: Size, passes: int, cache: str | None) -> dict[str, float]:
    from stillroom.config import load_config
    from stillroom.core.errors import NoBetterStudent
    from stillroom.training import loop
    from stillroom.training.distill import distill

    over = {
        **settings(folder, size, steps=passes * _per_pass(size)),
        "teacher.cache": cache,
        "eval.max_batches": 1,
        "eval.samples": 0,
        "train.eval_steps": 10**6,
        "train.save_steps": 10**6,
    }
    spent = {"training_wall": 0.0, "training_cpu": 0.0, "steps": 0.0}
    original = loop.train_step

    def timed(*args: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = original(*args)
        spent["training_wall"] += time.perf_counter() - wall
        spent["training_cpu"] += time.process_time() - cpu
        spent["steps"] += 1
        return outcome

    loop.train_step = timed
    out = Path(tempfile.mkdtemp(dir=folder))
    with suppress(NoBetterStudent):  # the text is random, so nothing can be learnt from it; the run is complete
        distill(load_config(overrides=over), out / "run", device="cpu")
    return spent


def _trl(folder: Path, size: Size, passes: int) -> dict[str, float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    spent = {"training_wall": 0.0, "training_cpu": 0.0, "steps": 0.0}
    begin = [0.0, 0.0]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begin[:] = [time.perf_counter(), time.process_time()]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            spent["training_wall"] += time.perf_counter() - begin[0]
            spent["training_cpu"] += time.process_time() - begin[1]
            spent["steps"] += 1

    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.tensor([item["input_ids"] for item in items])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    teacher, student = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("teacher", "student"))
    texts = [json.loads(line)["text"] for line in (folder / "train.jsonl").read_text().splitlines()]
    rows = [tokenizer(text)["input_ids"][: size.length] for text in texts][: size.batch * _per_pass(size)]
    out = tempfile.mkdtemp(dir=folder)
    args = GKDConfig(
        output_dir=out, max_steps=passes * _per_pass(size), per_device_train_batch_size=size.batch, learning_rate=1e-4,
        lmbda=0.0, beta=0.0, max_grad_norm=1.0, weight_decay=0.0, report_to=[], logging_strategy="no",
        save_strategy="no", use_cpu=True, gradient_checkpointing=False, bf16=False, fp16=False, disable_tqdm=True,
        dataloader_num_workers=0, seed=0,
    )  # fmt: skip
    trainer = GKDTrainer(
        model=student, teacher_model=teacher, args=args, data_collator=collate, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"input_ids": rows}), callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(out)
    return spent


CONTENDERS: dict[str, Callable[[Path, Size, int], dict[str, float]]] = {
    CACHED: lambda folder, size, passes: _stillroom(folder, size, passes, "auto"),
    LIVE: lambda folder, size, passes: _stillroom(folder, size, passes, None),
    PEER: _trl,
}


def _per_pass(size: Size) -> int:
    return next(number for one, number in SIZES.values() if one == size)


def _run(name: str, folder: Path, size_name: str, passes: int) -> dict[str, float]:
    """CPU and wall seconds of the whole process, and CPU seconds within its training steps."""
    command = [sys.executable, __file__, "serve", name, str(folder), size_name, str(passes)]
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    before, begin = os.times(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    after = os.times()
    marked = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not marked:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"cpu": cpu, "wall": time.perf_counter() - begin, **json.loads(marked[-1].removeprefix(_MARK))}


def serve(name: str, folder: str, size_name: str, passes: str) -> None:
    spent = CONTENDERS[name](Path(folder), SIZES[size_name][0], int(passes))
    print(_MARK + json.dumps(spent), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
        return
    book: dict[str, Any] = json.loads(BOOK.read_text()) if BOOK.exists() else {"runs": {}}
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    book |= {"benchmark": "from nothing to a student", "date": started, "machine": machine()}
    book["busy_around"] = busy_processes()
    book["sizes"] = {name: {**asdict(size), "batches_a_pass": number} for name, (size, number) in SIZES.items()}
    for size_name, passes in PASSES:
        with tempfile.TemporaryDirectory() as folder:
            size, number = SIZES[size_name]
            # Held-out rows come on top: the share of `settings`.
            make_world(Path(folder), size, num_rows=-(-size.batch * number * 10 // 9) + 1)
            for name in CONTENDERS:
                key = f"{size_name} / {passes} / {name}"
                if key not in book["runs"]:
                    book["runs"][key] = {**_run(name, Path(folder), size_name, passes), "load": os.getloadavg()[0]}
                    BOOK.write_text(json.dumps(book, indent=1) + "\n")
                print(key, {word: round(value, 2) for word, value in book["runs"][key].items()}, flush=True)
    print(f"written: {BOOK}")


if __name__ == "__main__":
    main()
