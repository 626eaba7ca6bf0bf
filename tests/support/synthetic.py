"""A run that looks like a real one, made of formulas: for the tests of the report and for looking at it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from stillroom.telemetry.events import EventLog
from stillroom.telemetry.record import student_sum, write_evaluation
from stillroom.telemetry.results import retained

HEADER_PERPLEXITY = 2031.0


def start(num_steps: int, run: str) -> dict[str, Any]:
    return {
        "run": run,
        "config": config(),
        "versions": {"stillroom": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.3.1"},
        "machine": {"system": "Linux x86_64", "processors": 2, "memory_gb": 23.4, "device": "cpu"},
        "precision": {"mode": "fp16-master", "reason": "the card has no bf16; FP32 masters keep small updates"},
        "schedule": {
            "total_batches": num_steps * 4,
            "gradient_accumulation": 4,
            "optimizer_steps": num_steps,
            "warmup_steps": num_steps // 10,
            "learning_rate": 1e-3,
        },
        "teacher": {"name": "builtin:teacher", "parameters": 3214112, "vocabulary": 4096, "layers": 8, "width": 256},
        "student": {"name": "builtin:student", "parameters": 401220, "vocabulary": 4096, "layers": 2, "width": 128},
        "data": {
            "train_tokens": 2_410_331,
            "eval_tokens": 120_221,
            "train_documents": 1020,
            "eval_documents": 55,
            "truncated_records": 41,
            "shapes": {"text": 1020},
            "lengths": {"train": {"shortest": 12, "median": 256, "longest": 256}, "eval": {"median": 256}},
            "notes": ["3 of 1,023 records were empty and are not used"],
        },
    }


def config() -> dict[str, Any]:
    return {
        "teacher": {"model": "builtin:teacher", "dtype": "auto", "placement": "device", "cache": None},
        "student": {"model": "builtin:student", "init": "auto", "gradient_checkpointing": False},
        "data": {"train": "builtin:stdlib", "eval": None, "max_length": 256, "packing": "blocks"},
        "objectives": {"kd": {"weight": 0.9, "divergence": "forward_kl", "temperature": 1.0}, "ce": {"weight": 0.1}},
        "train": {"learning_rate": 0.001, "max_grad_norm": 1.0, "batch_size": 8, "seed": 0, "schedule": "cosine"},
        "guard": {"on_nonfinite": "recover", "max_consecutive": 20},
        "telemetry": {"log_steps": 10},
    }


def step(number: int, num_steps: int, noise: random.Random, verdict: str = "keep") -> dict[str, Any]:
    progress = number / num_steps
    kd = 0.45 + 6.2 * math.exp(-7 * progress) + noise.gauss(0, 0.07)
    ce = 3.1 + 5.0 * math.exp(-7 * progress) + noise.gauss(0, 0.09)
    hidden = 0.8 * math.exp(-3 * progress) + 0.05 + abs(noise.gauss(0, 0.01))
    weights = {"kd": 0.9, "ce": 0.1, "hidden": 0.0 if progress < 0.3 else 0.5 * min(1.0, (progress - 0.3) * 5)}
    scaled = {name: weights[name] * raw for name, raw in (("kd", kd), ("ce", ce), ("hidden", hidden))}
    whole = sum(scaled.values())
    terms = {
        name: {"raw": raw, "weight": weights[name], "scaled": scaled[name], "share": scaled[name] / whole}
        for name, raw in (("kd", kd), ("ce", ce), ("hidden", hidden))
    }
    warmup = num_steps / 10
    lr = 1e-3 * (number / warmup if number < warmup else 0.55 + 0.45 * math.cos(math.pi * progress))
    return {
        "step": number,
        "train_loss": whole if verdict == "keep" else math.nan,
        "lr": lr,
        "grad_norm": math.exp(noise.gauss(-0.6 + 2 * math.exp(-9 * progress), 0.3)) if verdict == "keep" else math.inf,
        "verdict": verdict,
        "success_rate": 0.998,
        "consecutive_nans": 0 if verdict == "keep" else 1,
        "gpu_memory_gb": 0.0,
        "loss_scale": 65536.0 / 2 ** (number > 0.2 * num_steps) / 2 ** (number > 0.62 * num_steps),
        "tokens_per_second": noise.gauss(8200, 260) * (0.6 if number % 150 < 2 else 1.0),
        "phase": "both" if progress < 0.3 else "inner",
        "terms": terms,
        "seconds": 1.0,
        "tokens": 8192,
        "memory_gb": 1.6 + 0.3 * min(1.0, 6 * progress),
        "memory_percent": 8.0,
        "eta_seconds": float(num_steps - number),
    }


def evaluation(number: int, num_steps: int) -> dict[str, Any]:
    progress = number / num_steps
    nats = math.log(57.1) + (math.log(HEADER_PERPLEXITY) - math.log(57.1)) * math.exp(-6.5 * progress)
    return {
        "step": number,
        "perplexity": math.exp(nats),
        "bits_per_byte": nats * 0.4,
        "kl": 0.41 + 5.0 * math.exp(-7 * progress),
        "agreement": 0.61 * (1 - math.exp(-6 * progress)),
        "intervals": {"perplexity": [0.95 * math.exp(nats), 1.05 * math.exp(nats)]},
        "objective": 0.98 + 6.2 * math.exp(-7 * progress),
        "terms": {},
        "unscored_tokens": 0,
        "best": True,
    }


def pulls(progress: float, name: str) -> dict[str, Any]:
    norms = {"kd": 0.8, "ce": 0.3 + 0.4 * progress, name: 0.1 * progress}
    terms = {term: {"norm": norm, "share": norm / sum(norms.values())} for term, norm in norms.items()}
    return {"terms": terms, "cosines": {"kd.ce": 0.8 - progress, f"kd.{name}": 0.1}}


def guard(log: EventLog, number: int, action: str, reason: str) -> None:
    evidence = {"loss": math.nan, "grad_norm": math.inf, "loss_scale": 32768.0}
    log.write("guard", step=number, action=action, reason=reason, sample_ids=["stdlib:ast:14"], evidence=evidence)


def write_events(log: EventLog, num_steps: int, until: int, name: str | None) -> None:
    noise = random.Random(7)
    log.write("run_start", **start(num_steps, name or "stdlib-demo"))
    log.write("note", text="the head takes the fused path: it agrees with the model's own logits to 2e-6")
    log.write("eval", **evaluation(0, num_steps))
    for number in range(1, until + 1):
        if number in (num_steps // 5, num_steps // 2):
            log.write("step", **step(number, num_steps, noise, verdict="skip"))
            guard(log, number, "skip", "the gradient norm is inf in group decay; the first bad tensor is layers.1.mlp")
        if number == int(0.62 * num_steps):
            guard(log, number, "retry", "overflow at loss scale 32,768: trying 16,384 on the same batch")
        if number == int(0.3 * num_steps):
            log.write("phase", step=number, **{"from": "both", "to": name or "inner"})
        record = step(number, num_steps, noise)
        record["terms"][name or "hidden"] = record["terms"].pop("hidden")
        log.write("step", **record)
        if number % (num_steps // 10) == 1:
            log.write("gradients", step=number, **pulls(number / num_steps, name or "hidden"))
        if number % (num_steps // 10) == 0:
            log.write("eval", **evaluation(number, num_steps))
            log.write("checkpoint", step=number, path=f"checkpoints/step-{number:06d}", bytes=5_200_000, seconds=0.2)
    teacher = "self, name, value):\n        if name not in self._fields:\n            raise AttributeError(name)\n"
    student = "self, name, value):\n        self.name = name\n        return self.value(name)\n"
    log.write("sample", prompt=name or "def set(", teacher=teacher, student=student, reference="self, key, item): ...")
    prose = "Return the number of items in the "
    log.write("sample", prompt=prose, teacher="container, or zero if it is empty.", student="list of the given name.")


def summary(num_steps: int) -> dict[str, Any]:
    student: dict[str, Any] = {
        "perplexity": 57.1,
        "bits_per_byte": 1.62,
        "kl": 0.41,
        "agreement": 0.612,
        "top5_agreement": 0.881,
        "top5_overlap": 0.64,
        "acceptance": 0.702,
        "calibration_error": 0.021,
        "parameters": 401220,
        "documents": 55,
        "intervals": {"perplexity": [54.2, 60.3], "kl": [0.39, 0.43], "acceptance": [0.69, 0.71]},
    }
    plain = student | {"kl": None, "agreement": None, "steps": num_steps, "tokens": num_steps * 8192}
    return {
        "status": "done",
        "steps": num_steps,
        "tokens": num_steps * 8192,
        "seconds": 1512.0,
        "success_rate": 0.9987,
        "skipped": 2,
        "rollbacks": 0,
        "teacher": student
        | {"perplexity": 20.3, "bits_per_byte": 1.2, "kl": 0.0, "agreement": 1.0, "parameters": 3214112},
        "student_before": student | {"perplexity": 2031.0, "bits_per_byte": 3.05, "kl": 5.41, "agreement": 0.003},
        "student": student,
        "baseline": plain | {"perplexity": 141.0, "bits_per_byte": 1.98, "seconds": 802.0},
        "baseline_equal_compute": plain | {"perplexity": 134.0, "bits_per_byte": 1.96, "seconds": 1509.0},
        "advice": [
            {
                "cause": "the loss scale was halved twice",
                "steps": [num_steps // 5, int(0.62 * num_steps)],
                "evidence": "two overflows at 65,536 and 32,768",
                "advice": "start lower: --set precision.loss_scale=16384",
            },
            "train for longer: the curve still falls",
        ],
        "checks": [
            {"name": "held-out perplexity below 100", "passed": True, "text": "57.1"},
            {"name": "train/eval gap below 2x", "passed": True, "text": "0.97 against 0.98"},
            {"name": "no value was non-finite for an epoch", "passed": False, "text": "2 steps were skipped"},
        ],
    }


def tokens(name: str | None = None) -> dict[str, Any]:
    """A token view of two rows: words of a text, each with a made-up comparison."""
    noise = random.Random(11)
    words = ["def", " read", "_all", "(", "self", ",", " path", ")", ":", "\n", "    ", "return", " [", "line", "]"]
    texts = {str(number): word for number, word in enumerate(words)} | ({"2": name} if name else {})
    rows = []
    for row in range(2):
        shown: list[dict[str, Any]] = [{"text": "<|end|>"}, {"text": name or "# "}]
        for place in range(60):
            distance = round(noise.random() ** 2, 4)
            theirs, ours = ([[(place + move) % 15, round(0.5 / (move + 1), 4)] for move in range(5)] for _ in "ts")
            if distance > 0.4:
                ours.reverse()
            sides = {"teacher": theirs, "student": ours, "teacher_probability": 0.5, "student_probability": 0.1}
            shown.append({"text": words[place % 15], "distance": distance, **sides})
        rows.append({"id": name or f"stdlib:ast:{row}", "tokens": shown, "left_out": 7, "uncompared": 0})
    return {"schema": 1, "compared": "the whole vocabulary", "rows": rows, "texts": texts}


def write_run(folder: Path, *, num_steps: int = 1500, until: int | None = None, name: str | None = None) -> Path:
    """Write a finished run, or one that crashed after step `until`.

    `name` is used wherever a name comes from outside: the run, a term, a phase, a prompt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with EventLog(folder / "events.jsonl") as log:
        write_events(log, num_steps, num_steps if until is None else until, name)
        if until is None:
            log.write("run_end", status="done", steps=num_steps, seconds=1512.0, exit_code=0)
    (folder / "config.json").write_text(json.dumps(config()))
    if until is None:
        (folder / "tokens.json").write_text(json.dumps(tokens(name)))
        (folder / "summary.json").write_text(json.dumps(summary(num_steps)))
        write_evaluated(folder, name)
    else:
        with (folder / "events.jsonl").open("a") as file:
            file.write('{"event": "step", "st')
    return folder


def write_evaluated(folder: Path, name: str | None = None) -> None:
    """Figures of `stillroom eval`, and the student that they are of."""
    (folder / "student").mkdir(exist_ok=True)
    (folder / "student" / "model.safetensors").write_bytes(b"weights")
    record = evaluated()
    for role in ("student", "teacher"):
        record[role]["tasks"][name or "piqa"] = {name or "acc": 0.5}
    write_evaluation(folder, student_sum(folder), record | ({"data": name} if name else {}))


def evaluated() -> dict[str, Any]:
    """A record of `stillroom eval`, as `eval.json` holds it."""
    questions = {
        "questions": 120, "too_long": 0, "choice_accuracy": 0.425, "exact_match": 0.31, "answer_perplexity": 9.1,
        "intervals": {"choice_accuracy": [0.34, 0.51], "exact_match": [0.23, 0.4]},
    }  # fmt: skip
    arc = {"samples": 2376, "word_perplexity": 40.0, "higher_is_better": {"acc": True, "word_perplexity": False}}
    student: dict[str, Any] = {
        "perplexity": 57.1, "bits_per_byte": 1.62, "kl": 0.41, "agreement": 0.612, "parameters": 401220,
        "disk_megabytes": 1.61, "load_seconds": 0.21, "prefill_tokens_per_second": 9120.0, "documents": 55,
        "decode_tokens_per_second": 310.5, "peak_memory_gb": 0.011, "intervals": {"perplexity": [54.2, 60.3]},
        "questions": questions, "notes": [],
        "tasks": {"arc_easy": arc | {"acc": 0.31, "intervals": {"acc": [0.287, 0.334]}}},
    }  # fmt: skip
    teacher = student | {
        "perplexity": 20.3, "bits_per_byte": 1.2, "kl": 0.0, "agreement": 1.0, "parameters": 3214112,
        "disk_megabytes": 12.9, "prefill_tokens_per_second": 2210.0, "decode_tokens_per_second": 142.0,
        "questions": questions | {"choice_accuracy": 0.61, "exact_match": 0.48, "answer_perplexity": 4.2},
        "tasks": {"arc_easy": arc | {"acc": 0.44, "word_perplexity": 20.0}},
    }  # fmt: skip
    return {
        "data": "held_out.jsonl",
        "device": "cpu",
        "student": student,
        "teacher": teacher,
        "teacher_model": "builtin:teacher",
        "retained": retained(student, teacher),
        "machine": {"cores": 2},
        "settings": {"max_length": 256, "questions": "questions.jsonl", "tasks": "arc_easy", "blocks": False},
        "notes": ["each record is scored by itself"],
    }
