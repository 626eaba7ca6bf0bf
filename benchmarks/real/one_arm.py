"""The jobs of the benchmark, each in one process: train by the public configuration, judge, return a small record."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "head"))
sys.path.append(str(Path(__file__).parent.parent / "quantise"))

import torch
from arms import ANSWER_TOKENS, ARMS, LENGTH, PLAIN, ROWS, SHARED, Arm
from budget import planned_steps, stored_tokens
from measure import peak_resident, resident_from_here
from place import Place, Record
from prompts import GIVEN, MADE, is_right
from text_files import sha256

from stillroom.config import Config
from stillroom.config.schema import DataConfig, TeacherConfig
from stillroom.core.errors import FinishedBadly
from stillroom.data import fixed_batches, open_eval
from stillroom.export.folder import export
from stillroom.metrics.metrics import COLUMNS
from stillroom.metrics.questions import read_questions
from stillroom.models import LoadedModel, open_teacher
from stillroom.models.anatomy import in_eval_mode
from stillroom.models.generate import Writer
from stillroom.precision import resolve
from stillroom.telemetry.record import scan_events
from stillroom.training.distill import distill
from stillroom.training.evaluate import Evaluation, evaluate
from stillroom.training.models import load_models
from stillroom.training.write_cache import make_cache

CPU = torch.device("cpu")
_NLL, _BYTES = COLUMNS.index("nll"), COLUMNS.index("bytes")
_ROUNDS_TIMED = 3  # times as many steps of an arm with rounds are timed: a few of them are rollouts


# -- training --------------------------------------------------------------------------------------------


def run_texts(place: Place) -> Record:
    """How many tokens there are to train on, and which prompts stand in them."""
    counts = {"tokens": _num_tokens(place), "docs_tokens": place.texts.tokens["docs"]}
    return {**counts, "dev_sha256": sha256(place.texts.dev), "prompts_seen": seen_prompts(place)}


def run_timing(place: Place, name: str) -> Record:
    """CPU seconds of a step of an arm, with what is spent between steps; of stored answers also those of asking."""
    arm, folder = ARMS[name], place.work / "timings" / name
    steps = place.scale.timing_steps * (_ROUNDS_TIMED if _has_rounds(arm) else 1)
    over, asked = _lasting(steps, 1), Record()
    if arm.epochs_stored:
        over["data.max_records"] = ROWS * steps  # of each source: enough for these steps
        asked = _asked(place, arm, folder.with_name(f"{name}-answers"), **over)
        over["teacher.cache"] = str(folder.with_name(f"{name}-answers"))
    _trained(_config(place, arm, **over), folder)
    runs = [_log_of(run) for run in _runs_of(folder)]
    later = [one for run in runs for number, one in run.steps.items() if number > 1]  # the first allocates and warms up
    made = {
        "steps": len(later),
        "cpu_seconds_per_step": sum(one["cpu"] for one in later) / len(later),
        "tokens_per_step": sum(one["tokens"] for one in later) / len(later),
        **({"cpu_seconds_per_token_asked": asked["cpu_seconds"] / asked["positions"]} if asked else {}),
    }
    shutil.rmtree(folder)
    return made


def run_trial(place: Place, name: str, rate: float, steps: int) -> Record:
    """The dev bits per byte of an arm's students, by the learning rate, after a short run with a whole schedule."""
    folder = place.work / "trials" / f"{name}-{rate:g}"
    summary = _trained(_config(place, ARMS[name], **{"train.learning_rate": rate, **_lasting(steps, 1)}), folder)
    spent = sum(sum(_log_of(run).spent.values()) for run in _runs_of(folder))
    made = {"arm": name, "rate": rate, "steps": steps, "status": summary["status"]}
    made |= {"cpu_seconds": round(spent, 1), "dev_bits_per_byte": summary["student"]["bits_per_byte"]}
    shutil.rmtree(folder)
    return made


def run_arm(place: Place, name: str, seed: int, *, rate: float, seconds: float, timing: Mapping[str, float]) -> Record:
    """Train an arm for so many CPU seconds and judge it. A run that was killed is resumed, a finished one judged."""
    arm, folder = ARMS[name], place.work / "runs" / f"{name}-{seed}"
    over: Record = {"train.learning_rate": rate, "train.seed": seed}
    allowed, asked = seconds * arm.share, Record()
    if arm.epochs_stored:
        a_token = timing["cpu_seconds_per_step"] / timing["tokens_per_step"]
        tokens = stored_tokens(allowed, timing["cpu_seconds_per_token_asked"], a_token, arm.epochs_stored)
        over["data.train_share"] = min(1.0, tokens / _num_tokens(place))
        asked = _asked(place, arm, folder.with_name(f"{folder.name}-answers"), **over)
        over["teacher.cache"] = str(folder.with_name(f"{folder.name}-answers"))
    steps = planned_steps(allowed, timing["cpu_seconds_per_step"], spent=asked.get("cpu_seconds", 0.0), least=4)
    over |= _lasting(steps, place.scale.evaluations)
    summary = _trained(_config(place, arm, **over), folder)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return {
        **_named(arm, seed),
        "settings": {**SHARED, **arm.settings, **over},
        "planned_cpu_seconds": round(allowed, 1),
        **_told_by(folder, summary, asked),
        **judge(place, _student(place, arm, seed)),
    }


def run_reference(place: Place, name: str) -> Record:
    """Judge the teacher, a cut student that is not trained, or a file that is made of a trained one."""
    arm = ARMS[name]
    return {**_named(arm, 0), **judge(place, _student(place, arm, 0))}


def _student(place: Place, arm: Arm, seed: int) -> LoadedModel:
    """The model of an arm as it is judged, with FP32 weights."""
    if not arm.student:
        return open_teacher(TeacherConfig(model=str(place.model)), torch.float32)
    if not arm.is_trained and not arm.base:
        return load_models(_config(place, arm, **PLAIN), CPU).loaded_student
    if not arm.file:
        return open_teacher(TeacherConfig(model=str(student_of(place, arm.name, seed))), torch.float32)
    return open_teacher(TeacherConfig(model=str(_exported(place, arm.name, arm.file))), torch.float32)


def student_of(place: Place, name: str, seed: int = 0) -> Path:
    """The folder of an arm's student; of the teacher, its own."""
    arm = ARMS[name]
    if not arm.student:
        return place.model
    return place.work / "runs" / f"{name if arm.is_trained else arm.base}-{seed}" / "student"


def _config(place: Place, arm: Arm, **over: Any) -> Config:
    """The configuration of a run of an arm, with its base."""
    base = {"student.model": str(student_of(place, arm.base))} if arm.base else {}
    return place.config(arm, **base, **over)


def _named(arm: Arm, seed: int) -> Record:
    return {"arm": arm.name, "label": arm.label, "student": arm.student, "seed": seed}


def _has_rounds(arm: Arm) -> bool:
    return any(name.startswith("rollouts.") for name in arm.settings)


def _lasting(steps: int, evaluations: int) -> Record:
    often = max(1, -(-steps // evaluations))
    return {"train.max_steps": steps, "train.eval_steps": often, "train.save_steps": often}


def _num_tokens(place: Place) -> int:
    """Of the transfer text, prompts included."""
    written = 0
    for kind in place.scale.written_tokens:
        with place.written(kind).open(encoding="utf-8") as lines:
            written += sum(len(row["prompt_ids"]) + len(row["ids"]) for row in map(json.loads, lines))
    return place.texts.tokens["docs"] + written


def _asked(place: Place, arm: Arm, answers: Path, **over: Any) -> Record:
    """Store the teacher's answers, with the CPU seconds of that over all starts."""
    clock = answers.with_suffix(".clock")
    before = float(clock.read_text()) if clock.exists() else 0.0
    began = time.process_time()

    def tick(_progress: Any) -> None:
        clock.write_text(str(before + time.process_time() - began))

    answers.parent.mkdir(parents=True, exist_ok=True)
    made = make_cache(_config(place, arm, **over), answers, device="cpu", on_progress=tick)
    tick(None)
    kept = {name: made[name] for name in ("rows", "positions", "bytes_per_position", "mean_mass")}
    return {"cpu_seconds": float(clock.read_text()), **kept}


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
        result = dict(distill(config, folder, device="cpu", listeners=(listen,)).summary)
    except FinishedBadly as error:  # an arm may fail, and the table then says so
        result = dict(error.summary)
    return {**result, "peak_bytes": json.loads(memory.read_text(encoding="utf-8"))["bytes"]}


@dataclass(frozen=True)
class _Log:
    """CPU seconds of a run by kind, and of each step with a round of rollouts before it."""

    spent: dict[str, float]
    steps: dict[int, dict[str, float]]
    events: list[Record]


def _runs_of(folder: Path) -> list[Path]:
    """The runs of an arm in their order: rounds of a student that is cut in rounds, then itself."""
    return [*sorted(path.parent for path in folder.glob("rounds/*/events.jsonl")), folder]


def _log_of(folder: Path) -> _Log:
    """Read a run's log; what a kill repeated counts once."""
    events = scan_events(folder / "events.jsonl").records
    steps = {
        event["step"]: {"cpu": event["cpu_seconds"], "tokens": event["tokens"]}
        for event in events
        if event["event"] == "step"
    }
    spent = {"steps": sum(record["cpu"] for record in steps.values())}
    rounds = {event["round"]: event for event in events if event["event"] == "rollouts"}
    for event in rounds.values():
        after = event["step"] + 1  # it is written before this step
        if after in steps:
            steps[after]["cpu"] += event["cpu_seconds"]
    if rounds:
        spent["rollouts"] = sum(event["cpu_seconds"] for event in rounds.values())
    cut = folder / "cut.json"
    if cut.exists():
        spent["cut"] = json.loads(cut.read_text(encoding="utf-8"))["cpu_seconds"]
    return _Log(spent, steps, list(events))


def _told_by(folder: Path, summary: Mapping[str, Any], asked: Mapping[str, Any]) -> Record:
    """What the logs and the summary of an arm say. The curve is of students of the final size alone."""
    *earlier, last = (_log_of(run) for run in _runs_of(folder))
    spent: Counter[str] = Counter({"asking": asked["cpu_seconds"]} if asked else {})
    for run in earlier:
        spent.update(run.spent)
    before = spent.total() + last.spent.get("cut", 0.0)
    spent.update(last.spent)
    so_far = {0: before}
    for number, record in sorted(last.steps.items()):
        so_far[number] = so_far[number - 1] + record["cpu"]
    curve = [
        {
            "cpu_seconds": round(so_far[event["step"]], 1),
            "step": event["step"],
            "bits_per_byte": event["bits_per_byte"],
        }
        for event in last.events
        if event["event"] == "eval" and event["step"] in so_far
    ]
    cut = folder / "cut.json"
    return {
        "status": summary["status"],
        "steps": sum(len(run.steps) for run in (*earlier, last)),
        "tokens": sum(step["tokens"] for run in (*earlier, last) for step in run.steps.values()),
        "learning_rate": summary["learning_rate"],
        "trained_parameters": summary["trained_parameters"],
        "skipped": summary["skipped"],
        "rollbacks": summary["rollbacks"],
        "starts": sum(event["event"] == "run_start" for event in last.events),
        "best_step": summary["best_step"],
        "cpu_seconds": {name: round(value, 1) for name, value in spent.items()},
        "curve": curve,
        "peak_gigabytes": round(summary["peak_bytes"] / 1e9, 2),
        "layers_kept": json.loads(cut.read_text(encoding="utf-8"))["layers"] if cut.exists() else [],
        **({"answers_stored": dict(asked)} if asked else {}),
    }


# -- judging ---------------------------------------------------------------------------------------------


def judge(place: Place, loaded: LoadedModel) -> Record:
    """Held-out bits per byte on each text, by document, and the answers to the prompts."""
    began = time.process_time()
    found: Record = {"parameters": loaded.anatomy.num_parameters}
    found["dev_bits_per_byte"] = _scored(loaded, place.texts.dev, place.scale.dev_batches).bits_per_byte
    for name, path in place.held_out().items():
        result = _scored(loaded, path, 0)
        row = result.yardsticks()
        found[name] = {
            "bits_per_byte": row["bits_per_byte"],
            "interval": row["intervals"].get("bits_per_byte"),
            "tokens": result.tokens,
            "documents": {
                document: [round(float(sums[_NLL]), 4), int(sums[_BYTES])]
                for document, sums in result.ledger._sums.items()
            },
            "sha256": sha256(path),
        }
    answers = _answers(loaded, place.scale.num_prompts)
    return {**found, "answers": answers, "judge_cpu_seconds": round(time.process_time() - began, 1)}


def _scored(loaded: LoadedModel, path: Path, num_batches: int) -> Evaluation:
    held_out = open_eval(str(path), loaded.tokenizer, DataConfig(train=str(path), max_length=LENGTH)).evaluation
    return evaluate(
        loaded.as_student(), list(fixed_batches(held_out, ROWS, num_batches)), precision=resolve("fp32", CPU)
    )


def _answers(loaded: LoadedModel, most: int) -> list[Record]:
    questions = [*read_questions(GIVEN), *read_questions(MADE)][:most]
    with in_eval_mode(loaded.network):
        writer = Writer(loaded.network, loaded.tokenizer)
        made = writer.continuations([one.text for one in questions], is_raw=True, max_new_tokens=ANSWER_TOKENS)
    return [
        {"prompt": asked.text, "text": one.text, "is_right": is_right(one.text, asked.answers)}
        for asked, one in zip(questions, made, strict=True)
    ]


def seen_prompts(place: Place) -> list[str]:
    """The prompts that stand in the transfer text as they are."""
    kinds = place.scale.written_tokens
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in (place.texts.docs, *(place.written(kind) for kind in kinds))
    )
    asked = [one.text for one in (*read_questions(GIVEN), *read_questions(MADE))]
    return [one for one in asked if json.dumps(one)[1:-1] in text]


# -- files -----------------------------------------------------------------------------------------------


def _exported(place: Place, name: str, form: str) -> Path:
    """The GGUF file of an arm's student, made once."""
    folder = place.work / "files" / f"{name}-{form}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        export(str(student_of(place, name)), folder, format="gguf", form=form, data=str(place.texts.dev))
    return next(iter(sorted(folder.glob("*.gguf"))))


def run_file(place: Place, name: str, form: str) -> Record:
    """Size of the file, and tokens that llama.cpp writes in a CPU second of one thread; None without xllamacpp."""
    path = _exported(place, name, form)
    made: Record = {"arm": name, "form": form, "bytes": path.stat().st_size, "tokens_per_cpu_second": None}
    if importlib.util.find_spec("xllamacpp") is not None:
        from bench_quantise import NUM_WRITTEN, SPEED

        command = [sys.executable, "-c", SPEED, str(path)]
        spent = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(3)]
        made["tokens_per_cpu_second"] = NUM_WRITTEN / min(float(one.split()[-1]) for one in spent)
    return made
