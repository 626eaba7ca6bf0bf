"""What is the student's own text worth? Arms at equal CPU seconds, writing included, on a task that can be checked.

python benchmarks/quality/rollouts/bench_rollouts.py [draw]

Each arm tries three learning rates on its first seed, keeps the best by greedy answers to dev prompts, and runs the
other seeds with it. An arm has as many steps as fit into the CPU seconds of the reference (240 steps in rounds of 16
with forward KL), by the cost of a step that was measured in a trial. A run that is in the results is not repeated.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import maze
import torch
from maze import Task
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import stillroom
from stillroom.models.writer import row_seed, write_rows
from stillroom.telemetry import read_events
from stillroom.training.run_folder import machine, versions

HERE = Path(__file__).parent
CACHE, RESULTS = HERE / ".cache", HERE / "results" / "rollouts.json"
TEACHER, STUDENT = {"width": 96, "layers": 4}, {"width": 48, "layers": 3}
STEPS, TRIAL_STEPS, ROWS, LENGTH = 240, 32, 16, 48
RATES, SEEDS = (2e-3, 5e-3, 1.2e-2), (0, 1, 2)
SAMPLES = 16  # texts a prompt that a teacher writes, and that missteps make

KD, JSD = {"objectives.kd.weight": 1.0, "objectives.ce.weight": 0.0}, {"objectives.kd.divergence": "jsd"}
PLAIN = {"objectives.kd.weight": 0.0, "objectives.ce.weight": 1.0}
RKL = {"objectives.kd.divergence": "reverse_kl"}
# A quarter of the run on gold text, then half rollouts.
ROUNDS = {"rollouts.max_new_tokens": maze.MOST + 1, "rollouts.batch_size": 64, "data.max_length": LENGTH}

# Arm: the text that is learned from, and the settings.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "rounds of 16, forward KL": ("gold", KD | ROUNDS),
    "plain": ("gold", PLAIN),
    "forward KL, gold": ("gold", KD),
    "forward KL, gold with missteps": ("missteps", KD),
    "forward KL, teacher's text T 1": ("t1.0", KD),
    "forward KL, teacher's text T 1.5": ("t1.5", KD),
    "rounds of 16, jsd": ("gold", KD | JSD | ROUNDS),
    "rounds of 16, reverse KL": ("gold", KD | RKL | ROUNDS),
    "one round, forward KL": ("gold", KD | ROUNDS | {"rollouts.every": 0}),
    "rounds of 16, stored union of 4 + 4, forward KL": (
        "gold", KD | ROUNDS | {"rollouts.answers": "stored", "rollouts.teacher_top": 4, "rollouts.student_top": 4},
    ),
    "rounds of 16, stored union of 4 + 4, reverse KL": (
        "gold",
        KD | RKL | ROUNDS | {"rollouts.answers": "stored", "rollouts.teacher_top": 4, "rollouts.student_top": 4},
    ),
}  # fmt: skip
REFERENCE = "rounds of 16, forward KL"


# -- models --------------------------------------------------------------------------------------------------


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    names = ["<pad>", "<s>", "</s>", *maze.CELLS, maze.COLON]
    raw = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def save_model(place: Path, size: dict[str, int], seed: int) -> Path:
    if not place.exists():
        torch.manual_seed(seed)
        words = tokenizer()
        width = size["width"]
        config = LlamaConfig(
            vocab_size=len(words), hidden_size=width, intermediate_size=width * 3, num_hidden_layers=size["layers"],
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
            pad_token_id=0, tie_word_embeddings=True,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(place)
        words.save_pretrained(place)
    return place


def school_teacher(task: Task) -> Path:
    """A teacher that also knows the way from where a misstep led. Trained once, and kept."""
    place = CACHE / "teacher"
    if place.exists():
        return place
    rng = random.Random(5)
    pairs = [*task.others, *task.parts["train"]] * 3
    rows = [
        (maze.prompt(*pair), maze.text(path))
        for pair in pairs
        if (path := task.path(*pair, rng, missteps=0.15))[-1] == pair[1]
    ]
    start = save_model(CACHE / "teacher-begun", TEACHER, 1)
    data, held = maze.write(CACHE / "all.jsonl", rows), maze.write(CACHE / "dev.jsonl", gold(task, "dev"))
    settings = common(start, data, held, 0, 3e-3) | PLAIN
    settings |= {"train.max_steps": 1200, "train.batch_size": 64, "train.save_steps": 100}
    stillroom.distill(stillroom.load_config(overrides=settings), CACHE / "teacher-run", device="cpu")  # or continue it
    shutil.copytree(CACHE / "teacher-run" / "student", place)
    return place


# -- texts ---------------------------------------------------------------------------------------------------


def gold(task: Task, part: str) -> list[tuple[str, str]]:
    rng = random.Random(0)
    return [(maze.prompt(*pair), maze.text(task.path(*pair, rng))) for pair in task.parts[part]]


def make_text(task: Task, kind: str, seed: int, teacher: Any) -> tuple[list[tuple[str, str]], float, dict[str, Any]]:
    """The rows of a text, the CPU seconds that a model took to write them, and facts."""
    began = time.process_time()
    pairs = [pair for pair in task.parts["train"] for _ in range(SAMPLES)]
    if kind == "gold":
        return gold(task, "train"), 0.0, {}
    if kind == "missteps":
        rng = random.Random(seed)
        paths = [(pair, task.path(*pair, rng, missteps=0.15)) for pair in pairs]
        rows = [(maze.prompt(*pair), maze.text(path)) for pair, path in paths if path[-1] == pair[1]]
        return rows, 0.0, {"rows": len(rows)}
    answers = answered(teacher, pairs, seed, temperature=float(kind.removeprefix("t")))
    ended = [(pair, text) for pair, (text, why) in zip(pairs, answers, strict=True) if why == "end" and text]
    right = sum(task.is_right(*pair, text) for pair, text in ended)
    rows = [(maze.prompt(*pair), text) for pair, text in ended]
    return rows, time.process_time() - began, {"rows": len(rows), "asked": len(pairs), "right": right / len(rows)}


def answered(
    model: Any, pairs: list[tuple[int, int]], seed: int, *, temperature: float, size: int = 128
) -> list[tuple[str, str]]:
    """The text of each answer, and why it ended."""
    words = tokenizer()
    found = []
    for start in range(0, len(pairs), size):
        part = pairs[start : start + size]
        prompts = [[1, *words(maze.prompt(*pair), add_special_tokens=False)["input_ids"]] for pair in part]
        seeds = [row_seed(seed, start + place) for place in range(len(part))]
        rows = write_rows(
            model, prompts, seeds, ends={2}, num_tokens=len(words), max_new_tokens=maze.MOST + 1,
            temperature=temperature,
        )  # fmt: skip
        found += [
            (
                "".join(words.convert_ids_to_tokens(row.ids[:-1] if row.ended == "end" else row.ids)).replace(
                    "</s>", ""
                ),
                row.ended,
            )
            for row in rows
        ]
    return found


# -- runs ----------------------------------------------------------------------------------------------------


def common(student: Path, data: Path, held: Path, seed: int, rate: float) -> dict[str, Any]:
    return {
        "student.model": str(student), "data.train": str(data), "data.eval": str(held), "data.max_length": LENGTH,
        "data.bos": True, "data.packing": "rows", "train.batch_size": ROWS, "train.gradient_accumulation_steps": 2,
        "train.learning_rate": rate, "train.warmup_ratio": 0.05, "train.seed": seed, "train.eval_steps": 10**6,
        "train.save_steps": 10**6, "train.compile": "off", "eval.samples": 0, "precision.mode": "fp32",
        "objectives.kd.temperature": 1.0,
    }  # fmt: skip


def run_arm(task: Task, arm: str, seed: int, rate: float, steps: int, *, is_judged: bool = True) -> dict[str, Any]:
    """Train a student, and answer dev and test prompts with it."""
    kind, settings = ARMS[arm]
    teacher = AutoModelForCausalLM.from_pretrained(CACHE / "teacher").eval()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows, written, facts = make_text(task, kind, seed, teacher)
        data = maze.write(folder / "train.jsonl", rows)
        held = maze.write(folder / "test.jsonl", gold(task, "test"))
        student = save_model(folder / "begun", STUDENT, 100 + seed)
        over = common(student, data, held, seed, rate) | settings | {"train.max_steps": steps}
        over |= {"teacher.model": str(CACHE / "teacher")}
        try:
            stillroom.distill(stillroom.load_config(overrides=over), folder / "run", device="cpu")
        except (
            stillroom.StillroomError
        ) as error:  # a student that got no better by cross-entropy is judged all the same
            facts = {**facts, "ended": f"{type(error).__name__}: {error.what}"}
        events = read_events(folder / "run" / "events.jsonl")
        spent = sum(event["cpu_seconds"] for event in events if event["event"] in ("step", "rollouts"))
        line: dict[str, Any] = {"arm": arm, "seed": seed, "rate": rate, "steps": steps, **facts}
        line |= {"cpu_seconds": round(spent + written, 2), "writing_seconds": round(written, 2)}
        if is_judged:
            line |= judge(task, folder / "run", student, teacher)
    return line


@torch.no_grad()
def judge(task: Task, run: Path, begun: Path, teacher: Any) -> dict[str, Any]:
    """The last student: right answers, greedy and drawn, its KL to the teacher on its own text, lengths, loops."""
    from safetensors.torch import load_file

    model = AutoModelForCausalLM.from_pretrained(begun).eval()
    newest = max((run / "checkpoints").glob("step-*"))
    model.load_state_dict(load_file(next(iter(sorted(newest.glob("*student*.safetensors"))))), strict=False)
    model.tie_weights()
    found: dict[str, Any] = {}
    for part in ("dev", "test"):
        pairs = task.parts[part]
        for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
            answers = answered(model, pairs, 77, temperature=temperature)
            right = [task.is_right(*pair, text) for pair, (text, _) in zip(pairs, answers, strict=True)]
            found[f"{part}_{name}"] = round(sum(right) / len(right), 4)
        found[f"{part}_unfinished"] = round(sum(why != "end" for _, why in answers) / len(answers), 4)
        found[f"{part}_length"] = round(statistics.mean(len(text) for text, _ in answers), 2)
    found["own_kl"] = round(own_kl(model, teacher, task.parts["dev"][:64]), 4)
    found["ce"] = round(_ce(model, gold(task, "test")), 4)
    return found


def _ce(model: Any, rows: list[tuple[str, str]]) -> float:
    """Cross-entropy of the gold answers and their ends, nats a token."""
    words, total, count = tokenizer(), 0.0, 0
    for prompt, answer in rows:
        ids = torch.tensor([[1, *words(prompt + answer, add_special_tokens=False)["input_ids"], 2]])
        log_probs = torch.log_softmax(model(ids).logits[0].float(), -1)
        targets = ids[0, 1 + len(prompt) :]
        total -= float(log_probs[len(prompt) : -1].gather(1, targets.unsqueeze(1)).sum())
        count += len(targets)
    return total / count


def own_kl(student: Any, teacher: Any, pairs: list[tuple[int, int]]) -> float:
    """Mean KL(student, teacher) a token, on answers that the student drew."""
    words, total, count = tokenizer(), 0.0, 0
    for pair, (text, _) in zip(pairs, answered(student, pairs, 78, temperature=1.0), strict=True):
        before = maze.prompt(*pair)
        ids = torch.tensor([[1, *words(before + text, add_special_tokens=False)["input_ids"]]])
        own, other = (torch.log_softmax(one(ids).logits[0, len(before) :].float(), -1) for one in (student, teacher))
        total += float((own.exp() * (own - other)).sum())
        count += len(own)
    return total / count


# -- the book ------------------------------------------------------------------------------------------------


class Book:
    """The results: a JSON file that grows run by run."""

    def __init__(self) -> None:
        held = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        self.facts: dict[str, Any] = held.get("facts", {})
        self.runs: list[dict[str, Any]] = held.get("runs", [])

    def fact(self, name: str, find: Callable[[], Any]) -> Any:
        if name not in self.facts:
            self.facts[name] = find()
            self.write()
        return self.facts[name]

    def run(self, arm: str, seed: int, rate: float, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        for line in self.runs:
            if (line["arm"], line["seed"], line["rate"]) == (arm, seed, rate):
                return line
        line = work()
        print(json.dumps(line), flush=True)
        self.runs.append(line)
        self.write()
        return line

    def write(self) -> None:
        RESULTS.parent.mkdir(exist_ok=True)
        content = {"machine": machine(), "versions": versions(), "facts": self.facts, "runs": self.runs}
        RESULTS.with_suffix(".draft").write_text(json.dumps(content, indent=1) + "\n")
        RESULTS.with_suffix(".draft").replace(RESULTS)


def sweep(book: Book) -> None:
    torch.set_num_threads(1)
    CACHE.mkdir(exist_ok=True)
    task = Task()
    place = school_teacher(task)
    teacher = AutoModelForCausalLM.from_pretrained(place).eval()

    def school_report() -> dict[str, float]:
        pairs = task.parts["test"]
        found = {"parameters": sum(one.numel() for one in teacher.parameters())}
        for name, temperature in (("greedy", 0.0), ("T 1", 1.0), ("T 1.5", 1.5)):
            answers = answered(teacher, pairs, 3, temperature=temperature)
            found[name] = sum(task.is_right(*one, text) for one, (text, _) in zip(pairs, answers, strict=True)) / 300
        return found

    print(book.fact("teacher", school_report), flush=True)

    def cost(arm: str) -> float:
        """CPU seconds a step, writing of the run's own rounds included, of a run as long as the reference's trial."""
        line = run_arm(task, arm, 0, RATES[0], TRIAL_STEPS, is_judged=False)
        return (line["cpu_seconds"] - line["writing_seconds"]) / TRIAL_STEPS

    for arm in ARMS:
        costs = {one: book.fact(f"seconds a step: {one}", lambda one=one: cost(one)) for one in (REFERENCE, arm)}
        writing = 0.0
        if ARMS[arm][0].startswith("t"):  # a teacher writes before the first step
            writing = book.fact(f"writing: {arm}", lambda arm=arm: make_text(task, ARMS[arm][0], 0, teacher)[1])
        steps = max(TRIAL_STEPS, round((STEPS * costs[REFERENCE] - writing) / costs[arm]))
        grid = {
            rate: book.run(arm, 0, rate, lambda arm=arm, rate=rate, steps=steps: run_arm(task, arm, 0, rate, steps))
            for rate in RATES
        }
        best = max(grid, key=lambda rate: (grid[rate]["dev_greedy"], grid[rate]["dev_drawn"]))
        for seed in SEEDS[1:]:
            book.run(arm, seed, best, lambda arm=arm, seed=seed, steps=steps: run_arm(task, arm, seed, best, steps))  # noqa: B023
        draw(book)


def reported(book: Book, arm: str) -> list[dict[str, Any]]:
    """The runs of an arm at its best rate by dev."""
    first = [line for line in book.runs if line["arm"] == arm and line["seed"] == SEEDS[0]]
    if not first:
        return []
    best = max(first, key=lambda line: (line["dev_greedy"], line["dev_drawn"]))["rate"]
    return sorted((one for one in book.runs if one["arm"] == arm and one["rate"] == best), key=lambda one: one["seed"])


def draw(book: Book) -> None:
    columns = ["cpu_seconds", "test_drawn", "own_kl", "ce", "test_unfinished", "test_length"]
    names = ["CPU s", "drawn", "own KL", "CE", "unfinished", "length"]
    lines = ["# The student's own text, at equal CPU seconds", ""]
    told = book.facts.get("teacher", {})
    lines += [
        f"Teacher: {json.dumps(told)}. Greedy accuracy by seed on 300 test prompts; the other columns are means.",
        "",
    ]
    lines += [
        "| arm | steps | rate | right, greedy (seeds) | mean | " + " | ".join(names) + " |",
        "|" + "---|" * (5 + len(names)),
    ]
    rows = []
    for arm in ARMS:
        runs = reported(book, arm)
        if runs:
            right = [one["test_greedy"] for one in runs]
            means = [f"{statistics.mean(one[name] for one in runs):.3f}" for name in columns]
            seeds = " ".join(f"{one:.3f}" for one in right)
            mean = statistics.mean(right)
            cells = [arm, str(runs[0]["steps"]), f"{runs[0]['rate']:g}", seeds, f"{mean:.3f}", *means]
            rows.append((mean, f"| {' | '.join(cells)} |"))
    lines += [row for _, row in sorted(rows, reverse=True)]
    machine_line = json.loads(RESULTS.read_text())["machine"]
    lines += ["", f"Machine: {json.dumps(machine_line)}. Drawn from `rollouts.json` by `bench_rollouts.py draw`.", ""]
    RESULTS.with_suffix(".md").write_text("\n".join(lines))


if __name__ == "__main__":
    if sys.argv[1:] == ["draw"]:
        draw(Book())
    else:
        sweep(Book())
