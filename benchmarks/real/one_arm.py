"""One arm in one process: train it by the public configuration, judge what it wrote, return a small record."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "head"))

import torch
from arms import ARMS, LENGTH, PLAIN, SHARED, TRIAL_STEPS, TRIALS, Arm
from measure import peak_resident, resident_from_here
from model_file import find_model
from text_files import Texts, write_texts

from stillroom.config import Config, load_config
from stillroom.config.schema import DataConfig, TeacherConfig
from stillroom.core.errors import NoBetterStudent
from stillroom.data import fixed_batches, open_eval
from stillroom.metrics.questions import read_questions
from stillroom.models import LoadedModel, load_tokenizer, open_teacher
from stillroom.models.generate import Writer
from stillroom.models.load import in_eval_mode
from stillroom.precision import resolve
from stillroom.telemetry.record import scan_events
from stillroom.training.distill import distill
from stillroom.training.evaluate import evaluate
from stillroom.training.models import load_models
from stillroom.training.write_cache import make_cache

CPU = torch.device("cpu")
ANSWER_TOKENS = 16
_EVAL_ROWS = 4
PROMPTS = Path(__file__).with_name("prompts.jsonl")

Record = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """The benchmark's cache: the model, the texts and the folders of the runs."""

    folder: Path
    file: Path  # the GGUF file
    model: Path  # the folder that was written from it
    texts: Texts

    @classmethod
    def at(cls, folder: Path) -> Place:
        file, model = find_model(folder), folder / "teacher"
        if not model.exists():
            _unpack(file, model)
        tokenizer = load_tokenizer(TeacherConfig(model=str(model)), str(model))
        return cls(folder, file, model, write_texts(folder / "texts", tokenizer))

    def config(self, settings: Mapping[str, Any], **over: Any) -> Config:
        files = {"data.train": str(self.texts.train), "data.eval": str(self.texts.dev)}
        return load_config(overrides={"teacher.model": str(self.model), **files, **SHARED, **settings, **over})


def _unpack(file: Path, folder: Path) -> None:
    """Write the GGUF file as a folder, once: reading it takes half a minute, and every arm would again."""
    loaded = open_teacher(TeacherConfig(model=str(file)), torch.float32)
    partial = folder.with_name(f"{folder.name}.partial")
    loaded.network.save_pretrained(partial)
    loaded.tokenizer.save_pretrained(partial)
    partial.rename(folder)


def run_trial(place: Place, name: str) -> Record:
    """Every rate of a trial on a few steps, and the one whose student is best on dev text."""
    trial, tried = TRIALS[name], {}
    for rate in trial.rates:
        folder = place.folder / "trials" / f"{name}-{rate:g}"
        settings = {**trial.settings, "train.learning_rate": rate}
        summary = _trained(place.config(settings, **_lasting(TRIAL_STEPS)), folder)
        tried[f"{rate:g}"] = summary["student"]["bits_per_byte"]
    return {"steps": TRIAL_STEPS, "dev_bits_per_byte": tried, "chosen": float(min(tried, key=tried.__getitem__))}


def run_arm(place: Place, name: str, seed: int, *, rate: float, steps: int) -> Record:
    """Train and judge an arm. A run that was killed is resumed, a finished one only judged."""
    arm = ARMS[name]
    if arm.is_reference:
        return {**_named(arm, seed), **judge(_reference(place, arm), place.texts)}
    folder = place.folder / "runs" / f"{name}-{seed}"
    settings = {**arm.settings, "train.learning_rate": rate, "train.seed": seed, **_lasting(steps)}
    over: Record = {"data.train": str(place.texts.more)} if arm.has_equal_compute else {}
    spent: Record = {}
    if arm.uses_cache:
        spent = _asked_once(place, settings)
        over["teacher.cache"] = str(place.folder / "answers")
    summary = _trained(place.config(settings, **over), folder)
    student = open_teacher(TeacherConfig(model=str(folder / "student")), torch.float32)
    return {
        **_named(arm, seed),
        "settings": {**SHARED, **settings, **({"teacher.cache": "hybrid"} if arm.uses_cache else {})},
        **spent,
        **_told_by(folder, summary),
        **judge(student, place.texts),
    }


def _named(arm: Arm, seed: int) -> Record:
    return {"arm": arm.name, "label": arm.label, "student": arm.student, "seed": seed}


def _lasting(steps: int) -> Record:
    return {"train.max_steps": steps, "train.eval_steps": steps}


def _reference(place: Place, arm: Arm) -> LoadedModel:
    if not arm.student:
        return open_teacher(TeacherConfig(model=str(place.file)), torch.float32)
    return load_models(place.config({**PLAIN, **arm.settings}), CPU).loaded_student


def _asked_once(place: Place, settings: Mapping[str, Any]) -> Record:
    """Store the teacher's answers; the processor seconds of that are kept beside them, over all starts."""
    answers, clock = place.folder / "answers", place.folder / "answers.json"
    before = json.loads(clock.read_text(encoding="utf-8"))["cpu_seconds"] if clock.exists() else 0.0
    began = time.process_time()
    made = make_cache(place.config(settings), answers, device="cpu")
    spent = before + time.process_time() - began
    clock.write_text(json.dumps({"cpu_seconds": spent}), encoding="utf-8")
    kept = ("rows", "positions", "bytes_per_position", "mean_mass")
    return {"asking_cpu_seconds": round(spent, 1), "answers_stored": {name: made[name] for name in kept}}


def _trained(config: Config, folder: Path) -> Record:
    """Distil into a folder, or resume there. The peak of memory is that of the steps, without loading and cutting."""
    memory = folder.with_suffix(".memory.json")
    seen: list[int] = []

    def listen(event: Mapping[str, Any]) -> None:
        if event.get("event") != "step":
            return
        if not seen:
            resident_from_here()
        seen.append(peak_resident())
        memory.write_text(json.dumps({"bytes": max(seen)}), encoding="utf-8")

    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        result = distill(config, folder, device="cpu", listeners=(listen,)).summary
    except NoBetterStudent as error:  # an arm may fail, and the table then says so
        result = dict(error.summary)
    return {**result, "peak_bytes": json.loads(memory.read_text(encoding="utf-8"))["bytes"]}


def _told_by(folder: Path, summary: Mapping[str, Any]) -> Record:
    """What the log and the summary of a run say; steps taken twice after a kill are counted once."""
    events = scan_events(folder / "events.jsonl").records
    steps = {event["step"]: event for event in events if event["event"] == "step"}
    cpu = sum(event["cpu_seconds"] for event in steps.values())
    later = [event for number, event in steps.items() if number > 1]  # the first allocates and warms up
    quantised = summary.get("teacher_quantisation")
    return {
        "status": summary["status"],
        "steps": summary["steps"],
        "tokens": summary["tokens"],
        "learning_rate": summary["learning_rate"],
        "trained_parameters": summary["trained_parameters"],
        "parameters": summary["student"]["parameters"],
        "skipped": summary["skipped"],
        "rollbacks": summary["rollbacks"],
        "starts": sum(event["event"] == "run_start" for event in events),
        "best_step": summary["best_step"],
        "dev_bits_per_byte": {
            "before": summary["student_before"]["bits_per_byte"],
            "after": summary["student"]["bits_per_byte"],
        },
        "step_cpu_seconds": round(cpu, 1),
        "cpu_seconds_per_token": sum(event["cpu_seconds"] for event in later) / sum(event["tokens"] for event in later),
        "step_wall_seconds": round(sum(event["seconds"] for event in steps.values()), 1),
        "peak_gigabytes": round(summary["peak_bytes"] / 1e9, 2),
        "layers_kept": _kept(folder),
        **({"teacher_quantisation": quantised} if quantised else {}),
    }


def _kept(folder: Path) -> list[int]:
    kept: list[int] = json.loads((folder / "cut.json").read_text(encoding="utf-8"))["layers"]
    return kept


# -- judging ---------------------------------------------------------------------------------------------


def judge(loaded: LoadedModel, texts: Texts) -> Record:
    """Held-out bits per byte on both texts, and the answers to the prompts."""
    found: Record = {"parameters": loaded.anatomy.num_parameters}
    for name, path in (("test", texts.test), ("far", texts.far)):
        held_out = open_eval(str(path), loaded.tokenizer, DataConfig(train=str(path), max_length=LENGTH)).evaluation
        batches = list(fixed_batches(held_out, _EVAL_ROWS, 0))
        row = evaluate(loaded.as_student(), batches, precision=resolve("fp32", CPU)).yardsticks()
        found[name] = {
            "bits_per_byte": row["bits_per_byte"],
            "interval": row["intervals"].get("bits_per_byte"),
            "perplexity": row["perplexity"],
            "tokens": sum(batch.num_scored for batch in batches),
            "documents": row["documents"],
        }
    return {**found, "answers": _answers(loaded)}


def _answers(loaded: LoadedModel) -> list[Record]:
    questions = read_questions(PROMPTS)
    with in_eval_mode(loaded.network):
        writer = Writer(loaded.network, loaded.tokenizer)
        made = writer.continuations([one.text for one in questions], is_raw=True, max_new_tokens=ANSWER_TOKENS)
    return [
        {"prompt": asked.text, "text": one.text, "is_right": is_right(one.text, asked.answers)}
        for asked, one in zip(questions, made, strict=True)
    ]


def is_right(text: str, answers: tuple[str, ...]) -> bool:
    """Whether one of the answers, each a word, stands in the first line of a text."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    words = re.findall(r"\w+", first.lower())
    return any(answer.lower() in words for answer in answers)
