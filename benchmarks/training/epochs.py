"""Seconds from nothing to a finished student, for one, three and ten passes over the data.

    python benchmarks/training/epochs.py                  # small and real sizes; resumes where it was ended
    python benchmarks/training/epochs.py whole bf16       # 100,000 tokens at 135M to 81M, one and three passes

Each run is a process of its own that loads the models, reads the data, trains and saves: Stillroom with a teacher
that is asked once and stored (`teacher.cache = "auto"`, writing included), Stillroom with a live teacher, and trl's
GKD trainer. Contenders take turns. `whole` does not train for 100,000 tokens: it takes runs of 4 and 12 steps and one
of three passes over 4, and extends their CPU seconds to 98 steps a pass, start and end counted once. On a machine that
others use, OMP_NUM_THREADS=1 and CPU seconds still say something.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
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
# SmolLM2-360M's shape and SmolLM2-135M's, widths rounded to heads of 64.
LARGE = Size(49_152, 256, 4, teacher_layers=32, teacher_width=960, student_layers=30, student_width=576, is_tied=True)
SIZES = {"small": (Size(), 12), "135M to 81M": (REAL, 6)}  # with full batches in a pass
PASSES = (("small", 1), ("small", 3), ("135M to 81M", 1), ("135M to 81M", 3), ("small", 10))
LIVE, CACHED, PEER = "stillroom, live", "stillroom, cached", "trl GKD trainer, forward KL (beta 0)"


def _stillroom(folder: Path, size: Size, steps: int, cache: str | None, **settings_: Any) -> dict[str, float]:
    from stillroom.config import load_config
    from stillroom.core.errors import NoBetterStudent
    from stillroom.training import loop
    from stillroom.training.distill import distill

    over = {
        **settings(folder, size, steps=steps),
        "teacher.cache": cache,
        "eval.max_batches": 1,
        "eval.samples": 0,
        "train.eval_steps": 10**6,
        "train.save_steps": 10**6,
        **settings_,
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


def _trl(folder: Path, size: Size, steps: int, num_batches: int, *, is_bf16: bool = False) -> dict[str, float]:
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
    dtypes = {"teacher": torch.bfloat16 if is_bf16 else torch.float32, "student": torch.float32}
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype) for name, dtype in dtypes.items()
    )
    texts = [json.loads(line)["text"] for line in (folder / "train.jsonl").read_text().splitlines()]
    rows = [tokenizer(text)["input_ids"][: size.length] for text in texts][: size.batch * num_batches]
    out = tempfile.mkdtemp(dir=folder)
    args = GKDConfig(
        output_dir=out, max_steps=steps, per_device_train_batch_size=size.batch, learning_rate=1e-4,
        lmbda=0.0, beta=0.0, max_grad_norm=1.0, weight_decay=0.0, report_to=[], logging_strategy="no",
        save_strategy="no", use_cpu=True, gradient_checkpointing=False, bf16=is_bf16, fp16=False, disable_tqdm=True,
        dataloader_num_workers=0, seed=0,
    )  # fmt: skip
    trainer = GKDTrainer(
        model=student, teacher_model=teacher, args=args, data_collator=collate, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"input_ids": rows}), callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(out)
    return spent


def _contend(name: str, folder: Path, size: Size, num_batches: int, passes: int, mode: str) -> dict[str, float]:
    steps, over = passes * num_batches, {"precision.mode": {"bf16": "bf16-mixed", "fp32": "fp32"}[mode]}
    if name == PEER:
        return _trl(folder, size, steps, num_batches, is_bf16=mode == "bf16")
    return _stillroom(folder, size, steps, "auto" if name == CACHED else None, **over)


def _run(name: str, folder: Path, size_name: str, num_batches: int, passes: int, mode: str) -> dict[str, float]:
    """CPU and wall seconds of the whole process, and CPU seconds within its training steps."""
    command = [sys.executable, __file__, "serve", name, str(folder), size_name, str(num_batches), str(passes), mode]
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    before, begin = os.times(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    after = os.times()
    marked = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not marked:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"cpu": cpu, "wall": time.perf_counter() - begin, **json.loads(marked[-1].removeprefix(_MARK))}


def serve(name: str, folder: str, size_name: str, num_batches: str, passes: str, mode: str) -> None:
    spent = _contend(name, Path(folder), SIZES[size_name][0], int(num_batches), int(passes), mode)
    print(_MARK + json.dumps(spent), flush=True)


def _world(folder: str, size: Size, num_batches: int) -> Path:
    # Held-out rows come on top: the share of `settings`.
    return make_world(Path(folder), size, num_rows=-(-size.batch * num_batches * 10 // 9) + 1)


def whole(mode: str) -> None:
    """Seconds for 100,000 tokens, extended from short runs."""
    size_name, few, more = "135M to 81M", 4, 12
    size = SIZES[size_name][0]
    path = RESULTS / f"whole_{mode}_{torch.get_num_threads()}.json"
    book: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    book |= {"benchmark": "100,000 tokens from nothing to a student", "machine": machine(), "mode": mode}
    book |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "size": asdict(size)}
    book["busy_around"] = busy_processes()
    for num_batches, passes in ((few, 1), (more, 1), (few, 3)):
        with tempfile.TemporaryDirectory() as folder:
            _world(folder, size, num_batches)
            for name in (CACHED, LIVE, PEER):
                key = f"{num_batches} / {passes} / {name}"
                if key not in book["runs"]:
                    found = _run(name, Path(folder), size_name, num_batches, passes, mode)
                    book["runs"][key] = {**found, "load": os.getloadavg()[0]}
                    path.write_text(json.dumps(book, indent=1) + "\n")
                print(key, {word: round(value, 2) for word, value in book["runs"][key].items()}, flush=True)
    steps = -(-100_000 // size.tokens)
    book["steps_a_pass"], book["extended"] = steps, {}
    for name in (CACHED, LIVE, PEER):
        first, longer, thrice = (
            book["runs"][f"{key} / {name}"]["cpu"] for key in (f"{few} / 1", f"{more} / 1", f"{few} / 3")
        )
        a_step, a_later_step = (longer - first) / (more - few), (thrice - first) / (2 * few)
        start = first - few * a_step
        rows = {"cpu of start and end": start, "cpu a step": a_step, "cpu a later step": a_later_step}
        for passes in (1, 3):
            rows[f"cpu of {passes}"] = start + steps * a_step + (passes - 1) * steps * a_later_step
        book["extended"][name] = rows
    for rows in book["extended"].values():
        rows |= {
            f"{key}, speed against trl": book["extended"][PEER][key] / rows[key] for key in ("cpu of 1", "cpu of 3")
        }
    path.write_text(json.dumps(book, indent=1) + "\n")
    for name, rows in book["extended"].items():
        print(f"  {name:40s}", {word: round(value, 2) for word, value in rows.items()})
    print(f"written: {path}")


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
        return
    if sys.argv[1:2] == ["whole"]:
        whole(*sys.argv[2:])
        return
    book: dict[str, Any] = json.loads(BOOK.read_text()) if BOOK.exists() else {"runs": {}}
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    book |= {"benchmark": "from nothing to a student", "date": started, "machine": machine()}
    book["busy_around"] = busy_processes()
    book["sizes"] = {name: {**asdict(size), "batches_a_pass": number} for name, (size, number) in SIZES.items()}
    for size_name, passes in PASSES:
        with tempfile.TemporaryDirectory() as folder:
            size, number = SIZES[size_name]
            _world(folder, size, number)
            for name in (CACHED, LIVE, PEER):
                key = f"{size_name} / {passes} / {name}"
                if key not in book["runs"]:
                    book["runs"][key] = {
                        **_run(name, Path(folder), size_name, number, passes, "fp32"),
                        "load": os.getloadavg()[0],
                    }
                    BOOK.write_text(json.dumps(book, indent=1) + "\n")
                print(key, {word: round(value, 2) for word, value in book["runs"][key].items()}, flush=True)
    print(f"written: {BOOK}")


if __name__ == "__main__":
    main()
