"""What a cut SmolLM2 learns from text that its teacher wrote without prompts, and from documentation, at equal tokens.

    OMP_NUM_THREADS=1 python benchmarks/real/bench_written.py            # what is missing, in order
    python benchmarks/real/bench_written.py draw

The teacher writes questions from its chat template alone and answers them (`write.start = "template"`). The student,
cut to 15 of 30 layers, is distilled on them, or on the documentation of `bench_real.py` with as many steps of as many
tokens, in blocks, by forward KL from the live teacher. Judged by prompts.jsonl, continued as they stand and asked in
chat. Speeds are tokens a CPU second of one thread. Each part leaves its figures in results/written.json at once.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from arms import KL, LENGTH, SHARED
from one_arm import ANSWER_TOKENS, PROMPTS, Place, is_right

from stillroom.config import load_config
from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import FinishedBadly
from stillroom.data.chat import question_opening
from stillroom.metrics.questions import read_questions
from stillroom.models import LoadedModel, open_teacher
from stillroom.models.generate import Writer
from stillroom.models.load import in_eval_mode
from stillroom.models.writer import write_rows
from stillroom.telemetry.record import scan_events
from stillroom.training.distill import distill
from stillroom.training.models import load_models
from stillroom.training.run_folder import machine, versions
from stillroom.training.write import write_text

HERE = Path(__file__).parent
RESULT = HERE / "results" / "written.json"
ISSUE_TOKENS = 100_000
QUESTIONS, DTYPE, BATCH = 384, "bfloat16", 128
WRITE = {
    "write.start": "template", "write.max_prompts": QUESTIONS, "write.max_new_tokens": 96, "write.temperature": 0.8,
    "write.top_p": 0.95, "write.batch_size": BATCH, "teacher.dtype": DTYPE,
}  # fmt: skip
STEPS, ROWS, RATE, HELD_OUT = 60, 2, 6e-4, 0.05
SPEEDS = [(dtype, rows) for dtype in ("float32", "bfloat16") for rows in (32, 128)]
SPEED_TOKENS = 12
ARMS = ("documentation", "written")


def speed(place: Place, dtype: str, rows: int) -> dict[str, Any]:
    """Tokens a CPU second of questions from the template."""
    loaded = open_teacher(TeacherConfig(model=str(place.model)), getattr(torch, dtype))
    opening, _ends = question_opening(loaded.tokenizer, bos="auto")
    options: dict[str, Any] = {"ends": (), "num_tokens": len(loaded.tokenizer), "cuts_loops": False}
    write_rows(loaded.network, [opening], [0], max_new_tokens=2, **options)  # warms up, tries the cache
    began = time.process_time()
    write_rows(loaded.network, [opening] * rows, list(range(rows)), max_new_tokens=SPEED_TOKENS, **options)
    return {"tokens_per_cpu_second": round(rows * SPEED_TOKENS / (time.process_time() - began), 1)}


def write(place: Place) -> dict[str, Any]:
    began, out = time.process_time(), place.folder / "written.jsonl"
    about = write_text(load_config(overrides={"teacher.model": str(place.model), **WRITE}), out, device="cpu")
    spent = time.process_time() - began
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    tokens = sum(len(line["prompt_ids"]) + len(line["ids"]) for line in lines)
    words = [line["messages"][-2]["content"].split() for line in lines]
    pairs = [pair for one in words for pair in pairwise(one)]
    return {
        "answer_tokens": about["tokens"], "tokens_with_prompts": tokens, "cpu_seconds": round(spent, 1),
        "questions_asked_for": QUESTIONS, "rows": about["rows"], "counters": about["counters"],
        "distinct_pairs_of_words": round(len(set(pairs)) / max(len(pairs), 1), 3), "issue_tokens": ISSUE_TOKENS,
        "settings": WRITE, "examples": [line["messages"] for line in lines[:3]],
    }  # fmt: skip


def train(place: Place, text: str) -> dict[str, Any]:
    """Distil the cut student, and let it answer."""
    files = {"documentation": place.texts.more, "written": place.folder / "written.jsonl"}
    settings = {**SHARED, **KL, "precision.mode": "auto", "train.batch_size": ROWS, "data.packing": "packed"}
    settings |= {"train.max_steps": STEPS, "train.eval_steps": STEPS, "train.learning_rate": RATE}
    settings |= {"teacher.model": str(place.model), "data.train": str(files[text]), "data.eval": str(place.texts.dev)}
    folder = place.folder / "runs" / f"written-{text}"
    try:
        distill(load_config(overrides=settings), folder, device="cpu")
    except FinishedBadly as error:
        print(error.what)
    summary = json.loads((folder / "summary.json").read_bytes())
    events = scan_events(folder / "events.jsonl").records
    steps = [event for event in events if event["event"] == "step"]
    start = next(event for event in events if event["event"] == "run_start")
    student = open_teacher(TeacherConfig(model=str(folder / "student")), torch.float32)
    return {
        "steps": len(steps), "tokens": summary["tokens"], "status": summary["status"],
        "precision": start["precision"], "step_cpu_seconds": round(sum(step["cpu_seconds"] for step in steps), 1),
        "kd_last_10": sum(step["terms"]["kd"]["raw"] for step in steps[-10:]) / 10,
        "dev_bits_per_byte": {role: summary[role]["bits_per_byte"] for role in ("student_before", "student")},
        **answers(student),
    }  # fmt: skip


def answers(loaded: LoadedModel) -> dict[str, Any]:
    questions, found = read_questions(PROMPTS), {}
    with in_eval_mode(loaded.network):
        writer = Writer(loaded.network, loaded.tokenizer)
        for name, is_raw in (("continued", True), ("in_chat", False)):
            made = writer.continuations([one.text for one in questions], is_raw=is_raw, max_new_tokens=ANSWER_TOKENS)
            right = [is_right(one.text, asked.answers) for asked, one in zip(questions, made, strict=True)]
            found[name] = {"right": sum(right), "of": len(right), "texts": [one.text for one in made]}
    return found


def references(place: Place) -> dict[str, Any]:
    cut = load_models(place.config({**KL}), torch.device("cpu")).loaded_student
    return {
        "teacher": answers(open_teacher(TeacherConfig(model=str(place.model)), torch.float32)),
        "cut": answers(cut),
    }


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}

    def fact(name: str, find: Any) -> None:
        if name not in found:
            found[name] = find()
            RESULT.write_text(json.dumps({"machine": machine(), "versions": versions(), **found}, indent=1) + "\n")
            print(name, {key: value for key, value in found[name].items() if key != "examples"}, flush=True)

    if sys.argv[1:] != ["draw"]:
        place = Place.at(HERE / ".cache")
        for dtype, rows in SPEEDS:
            fact(f"speed {dtype} {rows}", lambda dtype=dtype, rows=rows: speed(place, dtype, rows))
        fact("write", lambda: write(place))
        fact("references", lambda: references(place))
        for arm in reversed(ARMS):
            fact(arm, lambda arm=arm: train(place, arm))
    draw(found)


def draw(found: dict[str, Any]) -> None:
    made = found["write"]
    lines = ["# Written without prompts", ""]
    lines += [
        f"SmolLM2-135M-Instruct wrote {made['answer_tokens']:,} tokens of answers to questions of its own "
        f"({made['tokens_with_prompts']:,} with the questions; {made['rows']} rows) in {made['cpu_seconds']:.0f} CPU "
        f"seconds. A student cut to 15 of its 30 layers is distilled on them, or on documentation: {STEPS} steps of "
        f"{ROWS} blocks of {LENGTH} tokens at rate {RATE:g}, forward KL, live teacher, one seed.",
        "",
        "| student | tokens scored | prompts continued | asked in chat | dev bits per byte | CPU s of steps |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in (*found["references"].items(), *((arm, found[arm]) for arm in ARMS if arm in found)):
        bits = row.get("dev_bits_per_byte", {}).get("student")
        cells = [name, f"{row['tokens']:,}" if "tokens" in row else ""]
        cells += [f"{row[key]['right']} of {row[key]['of']}" for key in ("continued", "in_chat")]
        cells += [f"{bits:.3f}" if bits else "", f"{row['step_cpu_seconds']:.0f}" if bits else ""]
        lines.append(f"| {' | '.join(cells)} |")
    names = {name: name.removeprefix("speed ") for name in found if name.startswith("speed")}
    speeds = ", ".join(f"{told} rows {found[name]['tokens_per_cpu_second']}" for name, told in names.items())
    lines += ["", f"Tokens a CPU second while it writes: {speeds}.", ""]
    lines += ["Dev is documentation, the text of one of the two. Drawn from `written.json` by `bench_written.py`.", ""]
    RESULT.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
