"""What is the student's own text worth? Arms at equal CPU seconds, writing included, on tasks that can be checked.

python benchmarks/quality/rollouts/bench_rollouts.py [run | select | draw]

Each arm tries its learning rates on its first seed, keeps the best by greedy answers to dev prompts, and runs the other
seeds with it. An arm has as many steps as fit into the CPU seconds of 240 steps of a short trial of the reference
(rounds of 16 with forward KL), by the cost of its own steps measured in turn. The answers of a student that has learned
nothing are long, so the steps of rounds are measured over half a run. The table has what was spent. The last student
counts, not the best. A run that is in the results is not repeated. `select` follows some runs and tells which student
each `eval.select` would have kept.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import book as books
import tasks
import torch
from book import Book
from safetensors.torch import load_file
from tasks import Task
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import stillroom
from stillroom.core.errors import FinishedBadly
from stillroom.models.writer import row_seed, write_rows
from stillroom.telemetry import read_events

HERE = Path(__file__).parent
CACHE, RESULTS = HERE / ".cache", HERE / "results"
TEACHERS = RESULTS / "teachers"  # kept with the results: arms that are run elsewhere, later, have the same teacher
TEACHER, STUDENT = (96, 4), (48, 3)  # width, layers
TEACHER_STEPS, TEACHER_ROWS = 900, 8000
STEPS, TRIAL_STEPS, ROUNDS_TRIAL_STEPS, ROWS, LENGTH = 240, 32, 160, 16, 48
RATES = (4e-3, 8e-3)
SAMPLES = 16  # texts a prompt that a teacher draws, and that missteps make; on many prompts one
LEADERS, LEADER_SEEDS = 4, tuple(range(8))  # arms that are run with more seeds: they are close

KD = {"objectives.kd.weight": 1.0, "objectives.ce.weight": 0.0, "objectives.kd.temperature": 1.0}
PLAIN = {"objectives.kd.weight": 0.0, "objectives.ce.weight": 1.0}
JSD, RKL = {"objectives.kd.divergence": "jsd"}, {"objectives.kd.divergence": "reverse_kl"}
ROUNDS = {"rollouts.batch_size": 64}  # a quarter of the run on gold text, then half rollouts: the defaults
STORED = {"rollouts.answers": "stored", "rollouts.teacher_top": 4, "rollouts.student_top": 4}

# Arm: the text that is learned from, and the settings.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "rounds of 16, forward KL": ("gold", KD | ROUNDS),
    "teacher's text, T 1.5, forward KL": ("t1.5", KD),
    "teacher's text, T 1, forward KL": ("t1.0", KD),
    "gold, forward KL": ("gold", KD),
    "gold with missteps, forward KL": ("missteps", KD),
    "gold, plain": ("gold", PLAIN),
    "rounds of 16, JSD": ("gold", KD | JSD | ROUNDS),
    "rounds of 16, reverse KL": ("gold", KD | RKL | ROUNDS),
    "rounds of 1, forward KL": ("gold", KD | ROUNDS | {"rollouts.every": 1}),
    "rounds of 64, forward KL": ("gold", KD | ROUNDS | {"rollouts.every": 64}),
    "one round, forward KL": ("gold", KD | ROUNDS | {"rollouts.every": 0}),
    "teacher's text, greedy, forward KL": ("t0.0", KD),
    "teacher's text, T 1, right answers, plain": ("t1.0 right", PLAIN),
    "teacher's text, T 1.5, right answers, forward KL": ("t1.5 right", KD),
    "rounds of 16, stored union of 4 + 4, forward KL": ("gold", KD | ROUNDS | STORED),
    "rounds of 16, stored union of 4 + 4, reverse KL": ("gold", KD | RKL | ROUNDS | STORED),
    "rounds of 16 at T 1.5, forward KL": ("gold", KD | ROUNDS | {"rollouts.temperature": 1.5}),
}  # fmt: skip
REFERENCE, *_ = ARMS
MAIN, CONTROLS = list(ARMS)[:11], list(ARMS)[:5]


@dataclass(frozen=True)
class Setting:
    """A task, whose prompts are learned from, and what its teacher was schooled on."""

    task: type[Task]
    part: str = "train"
    is_schooled_on_missteps: bool = True

    @property
    def teacher(self) -> str:
        return f"{self.task.name}{'' if self.is_schooled_on_missteps else '-gold'}"


SETTINGS = {
    "maze": Setting(tasks.Maze),
    "maze, teacher of gold text only": Setting(tasks.Maze, is_schooled_on_missteps=False),
    "sort": Setting(tasks.Sort),
    "maze, many prompts": Setting(tasks.Maze, part="all"),
}


@dataclass(frozen=True)
class Job:
    learning_rate: float
    seed: int
    steps: int


@cache
def task_of(kind: type[Task]) -> Task:
    return kind()


# -- models --------------------------------------------------------------------------------------------------


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter."""
    names = ["<pad>", "<s>", "</s>", *tasks.LETTERS, tasks.COLON]
    raw = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def save_model(place: Path, size: tuple[int, int], seed: int) -> Path:
    torch.manual_seed(seed)
    words, (width, layers) = tokenizer(), size
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=width, intermediate_size=width * 3, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    words.save_pretrained(place)
    return place


@cache
def teacher_folder(setting: Setting) -> Path:
    """Its teacher, schooled by plain cross-entropy on all prompts but dev and test. Made once, and kept.

    By default its text has missteps, so that it knows how to continue after them.
    """
    place, task = TEACHERS / setting.teacher, task_of(setting.task)
    if not place.exists():
        CACHE.mkdir(exist_ok=True)
        missteps = task.schooling if setting.is_schooled_on_missteps else 0.0
        items = task.parts["all"] * -(-TEACHER_ROWS // len(task.parts["all"]))
        rows = answers_of(task, items, random.Random(5), missteps)
        start = save_model(CACHE / f"{setting.teacher}-begun", TEACHER, 1)
        data = tasks.write(CACHE / f"{setting.teacher}.jsonl", rows)
        held = tasks.write(CACHE / f"{setting.teacher}-dev.jsonl", gold(task, "dev"))
        settings = common(start, data, held, Job(3e-3, 0, TEACHER_STEPS)) | PLAIN
        settings |= {"train.batch_size": 32, "train.save_steps": 100}
        run = CACHE / f"{setting.teacher}-run"  # begun, or continued
        stillroom.distill(stillroom.load_config(overrides=settings), run, device="cpu")
        shutil.copytree(run / "student", place)
    return place


@cache
def teacher_of(setting: Setting) -> Any:
    return AutoModelForCausalLM.from_pretrained(teacher_folder(setting)).eval()


# -- texts ---------------------------------------------------------------------------------------------------


def answers_of(task: Task, items: Iterable[Any], rng: random.Random, missteps: float) -> list[tuple[str, str]]:
    found = [(task.prompt(item), task.answer(item, rng, missteps)) for item in items]
    return [(prompt, answer) for prompt, answer in found if answer]


def gold(task: Task, part: str) -> list[tuple[str, str]]:
    return answers_of(task, task.parts[part], random.Random(0), 0.0)


def make_text(setting: Setting, kind: str, seed: int) -> tuple[list[tuple[str, str]], float, dict[str, Any]]:
    """The rows of a text, the CPU seconds that a model took to write them, and facts."""
    task, began = task_of(setting.task), time.process_time()
    if kind == "gold":
        return gold(task, setting.part), 0.0, {}
    samples = 1 if setting.part == "all" or kind == "t0.0" else SAMPLES
    items = [item for item in task.parts[setting.part] for _ in range(samples)]
    if kind == "missteps":
        rows = answers_of(task, items, random.Random(seed), task.schooling)
        return rows, 0.0, {"rows": len(rows)}
    temperature, *keep = kind.removeprefix("t").split()
    answers = answered(task, teacher_of(setting), items, seed, temperature=float(temperature))
    ended = [(item, text) for item, (text, why) in zip(items, answers, strict=True) if why == "end" and text]
    right = [(item, text) for item, text in ended if task.is_right(item, text)]
    rows = [(task.prompt(item), text) for item, text in (right if keep else ended)]
    facts = {"rows": len(rows), "asked": len(items), "right": round(len(right) / len(items), 4)}
    return rows, time.process_time() - began, facts


def answered(
    task: Task, model: Any, items: list[Any], seed: int, *, temperature: float, size: int = 128
) -> list[tuple[str, str]]:
    """The text of each answer, and why it ended."""
    words, found = tokenizer(), []
    for start in range(0, len(items), size):
        part = items[start : start + size]
        rows = write_rows(
            model,
            [[1, *words(task.prompt(item), add_special_tokens=False)["input_ids"]] for item in part],
            [row_seed(seed, start + place) for place in range(len(part))],
            ends={2},
            num_tokens=len(words),
            max_new_tokens=task.most + 1,
            temperature=temperature,
        )
        for row in rows:
            text = "".join(words.convert_ids_to_tokens(row.ids[:-1] if row.ended == "end" else row.ids))
            found.append((text, row.ended))
    return found


# -- runs ----------------------------------------------------------------------------------------------------


def common(student: Path, data: Path, held: Path, job: Job) -> dict[str, Any]:
    return {
        "student.model": str(student), "data.train": str(data), "data.eval": str(held), "data.max_length": LENGTH,
        "data.bos": True, "data.packing": "rows", "train.batch_size": ROWS, "train.gradient_accumulation_steps": 2,
        "train.learning_rate": job.learning_rate, "train.warmup_ratio": 0.05, "train.seed": job.seed,
        "train.max_steps": job.steps, "train.eval_steps": 10**6, "train.save_steps": 10**6, "train.compile": "off",
        "eval.samples": 0, "eval.max_batches": 1, "precision.mode": "fp32",
    }  # fmt: skip


def train(setting: Setting, arm: str, job: Job, folder: Path, **more: Any) -> dict[str, Any]:
    """Train a student in a folder. Return what it cost, and facts of its text."""
    (kind, settings), task = ARMS[arm], task_of(setting.task)
    rows, written, facts = make_text(setting, kind, job.seed)
    data = tasks.write(folder / "train.jsonl", rows)
    held = tasks.write(folder / "dev.jsonl", gold(task, "dev"))
    student = save_model(folder / "begun", STUDENT, 100 + job.seed)
    over = common(student, data, held, job) | settings | more
    over["teacher.model"] = str(teacher_folder(setting))
    if "rollouts.batch_size" in settings:
        over["rollouts.max_new_tokens"] = task.most + 1
    try:
        stillroom.distill(stillroom.load_config(overrides=over), folder / "run", device="cpu")
    except FinishedBadly as error:  # a student that is no better by its held-out loss is judged all the same
        facts["ended"] = error.what
    events = list(read_events(folder / "run" / "events.jsonl"))
    spent = sum(event["cpu_seconds"] for event in events if event["event"] in ("step", "rollouts"))
    rounds = [event for event in events if event["event"] == "rollouts"]
    own = sum(event["cpu_seconds"] for event in rounds)
    if rounds:
        ends = {name: sum(one["ended"][name] for one in rounds) for name in rounds[0]["ended"]}
        facts["rollouts"] = {"rounds": len(rounds), "ended": ends}
    return {"cpu_seconds": round(spent + written, 2), "writing_seconds": round(own + written, 2), **facts}


def run_arm(setting: Setting, arm: str, job: Job) -> dict[str, Any]:
    """Train a student, and answer dev and test prompts with the last one."""
    with tempfile.TemporaryDirectory() as scratch:
        line = train(setting, arm, job, Path(scratch))
        model = student_of(Path(scratch), *sorted((Path(scratch) / "run" / "checkpoints").glob("step-*"))[-1:])
    return {**line, **judge(setting, model)}


def student_of(folder: Path, checkpoint: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder / "begun").eval()
    model.load_state_dict(load_file(next(iter(sorted(checkpoint.glob("*student*.safetensors"))))), strict=False)
    model.tie_weights()
    return model


@torch.no_grad()
def judge(setting: Setting, model: Any) -> dict[str, Any]:
    """Right answers, greedy and drawn, KL to the teacher on its own text, lengths, and answers that do not end.

    `dev` and `test` are shares of wrong greedy answers, so that less is better as in the other experiments.
    """
    task, found = task_of(setting.task), {}
    for part in ("dev", "test"):
        items = task.parts[part]
        for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
            answers = answered(task, model, items, 77, temperature=temperature)
            right = sum(task.is_right(item, text) for item, (text, _) in zip(items, answers, strict=True))
            found[f"{part}_{name}"] = round(right / len(items), 4)
            found[f"{part}_{name}_endless"] = round(sum(why != "end" for _, why in answers) / len(items), 4)
            found[f"{part}_{name}_length"] = round(statistics.mean(len(text) for text, _ in answers), 2)
    found["own_kl"] = round(own_kl(task, model, teacher_of(setting), task.parts["dev"]), 4)
    found["ce"] = round(on_gold(task, "test", model), 4)
    return {**found, "dev": round(1 - found["dev_greedy"], 4), "test": round(1 - found["test_greedy"], 4)}


def padded(rows: list[tuple[str, str]], ends: list[bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts and answers as ids, padded behind, and which of them are answers or their ends."""
    words = tokenizer()
    ids = [
        [1, *words(prompt + answer, add_special_tokens=False)["input_ids"], *([2] if is_ended else [])]
        for (prompt, answer), is_ended in zip(rows, ends, strict=True)
    ]
    tokens = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.long)
    is_answer = torch.zeros_like(tokens, dtype=torch.bool)
    for place, (row, (prompt, _)) in enumerate(zip(ids, rows, strict=True)):
        tokens[place, : len(row)] = torch.tensor(row)
        is_answer[place, 1 + len(prompt) : len(row)] = True
    return tokens, is_answer


def on_gold(task: Task, part: str, model: Any, teacher: Any = None) -> float:
    """Cross-entropy of the gold answers and their ends; with a teacher KL(teacher, student) there. Nats a token."""
    rows = gold(task, part)
    tokens, is_answer = padded(rows, [True] * len(rows))
    log_q = torch.log_softmax(model(tokens).logits[:, :-1].float(), -1)
    if teacher is None:
        values = -log_q.gather(2, tokens[:, 1:, None])[..., 0]
    else:
        log_p = torch.log_softmax(teacher(tokens).logits[:, :-1].float(), -1)
        values = (log_p.exp() * (log_p - log_q)).sum(-1)
    return float(values[is_answer[:, 1:]].mean())


def own_kl(task: Task, student: Any, teacher: Any, items: list[Any]) -> float:
    """Mean KL(student, teacher) a token, on answers that the student drew."""
    answers = answered(task, student, items, 78, temperature=1.0)
    rows = [(task.prompt(item), text) for item, (text, _) in zip(items, answers, strict=True)]
    tokens, is_answer = padded(rows, [why == "end" for _, why in answers])
    log_q, log_p = (torch.log_softmax(one(tokens).logits[:, :-1].float(), -1) for one in (student, teacher))
    return float((log_q.exp() * (log_q - log_p)).sum(-1)[is_answer[:, 1:]].mean())


# -- the sweep -----------------------------------------------------------------------------------------------


def school_report(setting: Setting) -> dict[str, float]:
    task, teacher = task_of(setting.task), teacher_of(setting)
    items = task.parts["test"]
    found = {"parameters": sum(one.numel() for one in teacher.parameters())}
    for name, temperature in (("greedy", 0.0), ("T 1", 1.0), ("T 1.5", 1.5)):
        answers = answered(task, teacher, items, 3, temperature=temperature)
        right = sum(task.is_right(item, text) for item, (text, _) in zip(items, answers, strict=True))
        found[name] = round(right / len(items), 4)
    return found


def cost(setting: Setting, arm: str) -> dict[str, float]:
    """CPU seconds of a step with its part of rounds, of the arm and of the reference; those of text written before."""

    def trial(name: str, num_steps: int) -> tuple[float, float]:
        job = Job(RATES[0], 0, num_steps)
        with tempfile.TemporaryDirectory() as scratch:
            line = train(setting, name, job, Path(scratch))
        before = 0.0 if "rollouts" in line else line["writing_seconds"]
        return (line["cpu_seconds"] - before) / num_steps, before

    has_rounds = "rollouts.batch_size" in ARMS[arm][1]
    own, before = trial(arm, ROUNDS_TRIAL_STEPS if has_rounds else TRIAL_STEPS)
    reference, _ = trial(REFERENCE, TRIAL_STEPS)
    return {"step": round(own, 5), "reference": round(reference, 5), "before": round(before, 2)}


def steps_of(book: Book, name: str, arm: str) -> int:
    found = book.fact(f"cost: {name}: {arm}", lambda: cost(SETTINGS[name], arm))
    return max(TRIAL_STEPS, round((STEPS * found["reference"] - found["before"]) / found["step"]))


def tune(book: Book, name: str, arm: str, seeds: tuple[int, ...] = books.SEEDS) -> None:
    setting = SETTINGS[name]
    book.fact(f"teacher: {name}", lambda: school_report(setting))
    steps = steps_of(book, name, arm)
    work: Any = lambda job: run_arm(setting, arm, job)  # noqa: E731
    make: Any = lambda rate, seed: Job(rate, seed, steps)  # noqa: E731
    book.tuned(arm, make, seeds=seeds, rates=RATES, work=work, setting=name)
    draw(book)


def leaders(book: Book) -> list[str]:
    return sorted(ARMS, key=lambda arm: books.mean(book.values(arm, setting="maze").values()))[:LEADERS]


def sweep(book: Book) -> None:
    """The main comparison first: what is stopped early has it."""
    main, control, other, many = SETTINGS
    order = [(name, arm) for name, arms in ((main, MAIN), (control, CONTROLS), (other, CONTROLS)) for arm in arms]
    order += [(main, arm) for arm in ARMS if arm not in MAIN]
    for name, arm in order:
        tune(book, name, arm)
    for arm in leaders(book):
        tune(book, main, arm, LEADER_SEEDS)
    for arm in CONTROLS[:4]:
        tune(book, many, arm)


# -- which student -------------------------------------------------------------------------------------------

FOLLOWED = [CONTROLS[0], CONTROLS[1], CONTROLS[3], "gold, plain", "rounds of 16, reverse KL"]
LOOKS = 12
CHOICES = {  # by eval.select: the column that it goes by, and whether more is better
    "perplexity": ("ce", False), "objective": ("objective", False), "exact_match": ("exact", True),
    "checker": ("right", True), "own_kl": ("own_kl", False),
}  # fmt: skip


def follow(setting: Setting, arm: str, job: Job) -> list[dict[str, Any]]:
    """What `eval.select` may go by of students along a run, on dev, and the share of right answers on test."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        train(setting, arm, job, folder, **{"train.save_steps": job.steps // LOOKS, "checkpoint.keep": LOOKS + 2})
        checkpoints = sorted((folder / "run" / "checkpoints").glob("step-*"))
        return [
            _look(setting, arm, student_of(folder, one), int(one.name.removeprefix("step-"))) for one in checkpoints
        ]


@torch.no_grad()
def _look(setting: Setting, arm: str, model: Any, step: int) -> dict[str, Any]:
    task, teacher, line = task_of(setting.task), teacher_of(setting), dict[str, Any](step=step)
    for part, name in (("dev", "right"), ("test", "test")):
        items = task.parts[part]
        answers = [text for text, _ in answered(task, model, items, 77, temperature=0.0)]
        right = [task.is_right(item, text) for item, text in zip(items, answers, strict=True)]
        line[name] = round(sum(right) / len(right), 4)
        if part == "dev":
            wanted = [answer for _, answer in gold(task, part)]
            line["exact"] = round(sum(map(str.__eq__, answers, wanted)) / len(wanted), 4)
    line["ce"] = round(on_gold(task, "dev", model), 5)
    is_plain = ARMS[arm][1]["objectives.kd.weight"] == 0.0
    line["objective"] = line["ce"] if is_plain else round(on_gold(task, "dev", model, teacher), 5)
    return line | {"own_kl": round(own_kl(task, model, teacher, task.parts["dev"]), 5)}


def kept(lines: list[dict[str, Any]], select: str) -> dict[str, Any]:
    """The student that a choice keeps: of equal ones the one with the better perplexity, as in a run."""
    column, is_more = CHOICES[select]
    return min(lines, key=lambda line: (-line[column] if is_more else line[column], line["ce"]))


def select(book: Book) -> None:
    tuned = Book("rollouts", RESULTS)
    for arm in FOLLOWED:
        for _seed, line in sorted(tuned.lines(arm, setting="maze").items())[: len(books.SEEDS)]:
            job = Job(**line["job"])

            def work(job: Job, arm: str = arm) -> dict[str, Any]:
                lines = follow(SETTINGS["maze"], arm, job)
                last = lines[-1]["test"]
                return {"lines": lines, "dev": 1 - lines[-1]["right"], "test": 1 - last, "cpu_seconds": 0.0}

            book.run(arm, job, work, setting="maze")
    draw_select(book)


def draw_select(book: Book) -> None:
    rows = [["arm", *CHOICES, "last", "best of the run"]]
    lost: dict[str, list[float]] = {name: [] for name in (*CHOICES, "last")}
    for arm in FOLLOWED:
        runs = [line["lines"] for line in book.lines(arm, setting="maze").values()]
        if not runs:
            continue
        best = [max(one["test"] for one in lines) for lines in runs]
        values = {name: [kept(lines, name)["test"] for lines in runs] for name in CHOICES}
        values["last"] = [lines[-1]["test"] for lines in runs]
        for name, found in values.items():
            lost[name] += [one - other for one, other in zip(best, found, strict=True)]
        rows.append([arm, *(books.told(found) for found in values.values()), books.told(best)])
    rows.append(["lost on average", *(f"{books.mean(found):.3f}" for found in lost.values()), ""])
    rows.append(["lost at worst", *(f"{max(found):.3f}" for found in lost.values()), ""])
    book.facts["lost"] = {name: {"mean": books.mean(found), "worst": max(found)} for name, found in lost.items()}
    book.write()
    intro = (
        f"Students of {LOOKS} places along a run, maze, 128 prompts, three seeds. Each column chooses on dev (150 "
        "prompts, greedy) and shows the share of right greedy answers of its student on test (300 prompts). "
        "`exact_match` asks for the one path of the data, `checker` for any right one."
    )
    books.save_table(book, "Which student is kept", [intro, books.markdown(rows)])


# -- the table -----------------------------------------------------------------------------------------------

COLUMNS = {
    "drawn": ("test_drawn", ".3f"), "own KL": ("own_kl", ".3f"), "CE": ("ce", ".3f"),
    "endless": ("test_greedy_endless", ".3f"), "length": ("test_drawn_length", ".1f"),
    "CPU s": ("cpu_seconds", ".1f"), "of it writing": ("writing_seconds", ".1f"),
}  # fmt: skip


def draw(book: Book) -> None:
    parts = [
        "Right answers of the last student to 300 test prompts, "
        "greedy: by seed, mean, and against the first arm of the script paired by seed; **bold** where every "
        "seed agrees and the mean lies beyond twice its standard error. The other columns are means over seeds: right "
        "answers drawn at T 1, KL(student, teacher) on its own text, cross-entropy of gold answers, greedy answers "
        "without an end (loops), tokens of a drawn answer, CPU seconds of training with all writing. Steps were "
        "planned for equal seconds by trials, each next to one of the first arm. Seconds of different rows do not "
        "compare: arms were run on several machines, some of them busy."
    ]
    for name in SETTINGS:
        if f"teacher: {name}" not in book.facts:
            continue
        told = book.facts[f"teacher: {name}"]
        rows = [["arm", "steps", "rate", "right (seeds)", "mean", "against reference", *COLUMNS]]
        rows += [row for _, row in sorted(_row(book, name, arm) for arm in ARMS if book.lines(arm, setting=name))]
        shares = ", ".join(f"{key} {told[key]:.3f}" for key in ("greedy", "T 1", "T 1.5"))
        parts += [f"## {name}", f"Teacher of {told['parameters']:,} parameters: {shares}.", books.markdown(rows)]
    book.facts["right"] = {
        name: {arm: 1 - books.mean(wrong.values()) for arm in ARMS if (wrong := book.values(arm, setting=name))}
        for name in SETTINGS
    }
    book.write()
    books.save_table(book, "The student's own text, and text that its teacher wrote", parts)


def _row(book: Book, name: str, arm: str) -> tuple[float, list[str]]:
    lines, wrong = book.lines(arm, setting=name), book.values(arm, setting=name)
    first = next(iter(lines.values()))["job"]
    differences = books.paired(book.values(REFERENCE, setting=name), wrong)
    against = f"{books.mean(differences):+.3f}" if differences else ""
    if books.is_beyond(differences, 1) or books.is_beyond(differences, -1):
        against = f"**{against}**"
    seeds = " ".join(f"{1 - wrong[seed]:.3f}" for seed in sorted(wrong))
    means = [format(books.mean(line[key] for line in lines.values()), form) for key, form in COLUMNS.values()]
    wrong_mean = books.mean(wrong.values())
    return wrong_mean, [
        arm, str(first["steps"]), f"{first['learning_rate']:g}", seeds, f"{1 - wrong_mean:.3f}", against, *means
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["run", "select", "draw"], default="run")
    what = parser.parse_args().what
    torch.set_num_threads(1)
    if what == "run":
        sweep(Book("rollouts", RESULTS))
    elif what == "select":
        select(Book("select", RESULTS))
    else:
        draw(Book("rollouts", RESULTS))
        if (chosen := Book("select", RESULTS)).runs:
            draw_select(chosen)


if __name__ == "__main__":
    main()
