"""A teacher with one tokenizer and a student with another: what is a teacher of another family worth?

python benchmarks/quality/bench_crosstok.py

The student was trained on C++ in its own tokens (BPE over characters with byte fallback, 1,024 tokens) and now learns
Python from 256 pieces of at most 160 bytes, 16 in a step, 240 steps: scarce text, where distillation pays most
(transfer.md). Its teacher reads byte-level BPE of 2,048 tokens. The ceiling is plain KD from a teacher of the student's
own tokenizer, of the same shape, trained on the same text for as many steps. Bits per byte are those of the same
held-out pieces for every tokenizer.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import book as books
import lab
import nets
import pairs
import torch
from book import Book
from pairs import BYTE_LEVEL, SENTENCE_PIECE, Sides

from stillroom.config import load_config
from stillroom.data.tokenize import vocabulary_hash
from stillroom.teachers import Teacher
from stillroom.training.student import take_vocabulary

STEPS = 240
CHECKS = 8
LADDER = (3e-4, 1e-3, *books.RATES, 1e-1)
TWO, OWN, TEACHERS = Sides(SENTENCE_PIECE, BYTE_LEVEL), Sides(SENTENCE_PIECE), Sides(BYTE_LEVEL)
PLAIN, COMPUTE = "plain, equal tokens", "plain, equal compute"
DEFAULT, CEILING = "default (preset cross-tokenizer)", "ceiling: KD, one tokenizer"
SURGERY = "vocabulary surgery, KD"
_TIMED_STEPS = 40


def _preset() -> dict[str, float]:
    """The weights of the preset `cross-tokenizer`, as it is."""
    weights = load_config(preset="cross-tokenizer").objectives.weights
    return {f"{name}.weight": float(weight) for name, weight in weights.items()}


def _beside_labels(**weights: float) -> dict[str, float]:
    """Terms on spans beside the labels, each side with half of the weight of one."""
    return {"kd.weight": 0.0, "ce.weight": 0.5, **{f"{name}.weight": weight for name, weight in weights.items()}}


@dataclass(frozen=True)
class Arm:
    objectives: Mapping[str, Any]
    sides: Sides = TWO
    asks_teacher: bool = True
    is_live: bool = False  # asked at every step, where its inner states are compared


# In the order of what is most worth knowing: an interrupted sweep has the ends.
ARMS = {
    PLAIN: Arm(lab.PLAIN, OWN, asks_teacher=False),
    DEFAULT: Arm(_preset()),
    COMPUTE: Arm(lab.PLAIN, OWN, asks_teacher=False),
    CEILING: Arm({"kd.weight": 1.0}, OWN),
    "ALM": Arm(_beside_labels(alm=0.5)),
    SURGERY: Arm({"kd.weight": 1.0}, TEACHERS),
    "exact match": Arm(_beside_labels(exact_match=0.5)),
    "ALM and exact match": Arm(_beside_labels(alm=0.25, exact_match=0.25)),
    "hidden states of spans": Arm(_beside_labels(span_hidden=0.5), is_live=True),
    "prefix match": Arm(_beside_labels(prefix_match=0.5)),
    "vocabulary surgery, plain": Arm(lab.PLAIN, TEACHERS, asks_teacher=False),
    "ULD": Arm(_beside_labels(uld=0.5)),
}


def begun(arm: Arm, seed: int) -> Any:
    """The student as the arm begins: as it was trained, or with the teacher's vocabulary."""
    model = copy.deepcopy(pairs.pretrained(SENTENCE_PIECE, seed))
    if arm.sides == TEACHERS:
        take_vocabulary(model, pairs.tokenizer(SENTENCE_PIECE), pairs.tokenizer(BYTE_LEVEL))
    return model


def source_of(arm: Arm, *, is_live: bool = False) -> Teacher | None:
    if not arm.asks_teacher:
        return None
    if not (arm.is_live or is_live):
        return pairs.remembered(arm.sides)
    if arm.sides.teacher:
        return pairs.LivePair(arm.sides.teacher)
    return nets.live(pairs.teacher_model(arm.sides.student))


def run_of(arm: Arm, *, is_live: bool = False) -> Callable[[lab.Job], books.Line]:
    def run(job: lab.Job) -> books.Line:
        torch.set_num_threads(1)
        torch.manual_seed(job.seed)
        model = begun(arm, job.seed)
        trained = lab.train(job, model, source_of(arm, is_live=is_live), pairs.lessons(arm.sides))
        model.load_state_dict(trained.best)
        return {
            "test": pairs.bits_per_byte(model, arm.sides.student, "test"),
            "dev": trained.best_dev,
            "last_dev": trained.curve[-1][1],
            "best_step": trained.best_step,
            "cpu_seconds": round(trained.seconds, 3),
            "curve": trained.curve,
        }

    return run


def cost_ratio() -> dict[str, float]:
    """CPU seconds of a step of the default with a live teacher, of a plain one, and how many of these it is worth."""
    found = {}
    for name in (DEFAULT, PLAIN):
        arm = ARMS[name]
        job = lab.Job(arm.objectives, steps=_TIMED_STEPS, checks=1)
        work = run_of(arm, is_live=True)
        found[name] = statistics.median(work(job)["cpu_seconds"] / _TIMED_STEPS for _ in range(3))
    return {"taught": found[DEFAULT], "plain": found[PLAIN], "ratio": found[DEFAULT] / found[PLAIN]}


def setting() -> dict[str, Any]:
    """What the arms are compared on: tokenizers, their common spans, and the models before."""
    names = (BYTE_LEVEL, SENTENCE_PIECE)
    coverage = TWO.rows(pairs.transfer_set())[1]
    return {
        "tokenizers": {name: vocabulary_hash(pairs.tokenizer(name)) for name in names},
        "transfer_bytes": sum(len(record.text.encode()) for record in pairs.transfer_set()),
        "transfer_targets": {name: pairs.rows(Sides(name), "python", "transfer").num_targets for name in names},
        "coverage": coverage.to_dict(),
        "teachers": {name: pairs.bits_per_byte(pairs.teacher_model(name), name, "test") for name in names},
        "teacher_parameters": {name: nets.num_parameters(pairs.teacher_model(name)) for name in names},
        "student_parameters": nets.num_parameters(pairs.pretrained(SENTENCE_PIECE, 0)),
        "student_before": pairs.bits_per_byte(pairs.pretrained(SENTENCE_PIECE, 0), SENTENCE_PIECE, "test"),
        "surgery_parameters": nets.num_parameters(begun(ARMS[SURGERY], 0)),
        "surgery_before": pairs.bits_per_byte(begun(ARMS[SURGERY], 0), BYTE_LEVEL, "test"),
    }


def sweep(book: Book) -> None:
    book.fact("setting", setting)
    ratio = book.fact("cost", cost_ratio)["ratio"]
    for name, arm in ARMS.items():
        steps = round(STEPS * ratio) if name == COMPUTE else STEPS

        def make(rate: float, seed: int, arm: Arm = arm, steps: int = steps) -> lab.Job:
            return lab.Job(arm.objectives, rate, steps, seed, checks=CHECKS)

        book.tuned(name, make, rates=_rates(book, name, make, run_of(arm)), work=run_of(arm))


def _rates(book: Book, name: str, make: Callable[[float, int], lab.Job], work: Callable[[lab.Job], books.Line]) -> Any:
    """The laboratory's three rates, and the next one for as long as the best is the first or the last of them."""
    rates = list(books.RATES)
    while True:
        grid = {rate: book.run(name, make(rate, 0), work)["dev"] or float("inf") for rate in rates}
        place = LADDER.index(min(grid, key=lambda rate: grid[rate]))
        more = [LADDER[near] for near in (place - 1, place + 1) if 0 <= near < len(LADDER)]
        more = [rate for rate in more if rate not in rates]
        if not more:
            return sorted(rates)
        rates += more


# -- the table -------------------------------------------------------------------------------------------


def better_plain(book: Book) -> str:
    found = {name: books.mean(book.values(name).values()) for name in (PLAIN, COMPUTE)}
    return min(found, key=lambda name: found[name])


def figures(book: Book, plain: str) -> dict[str, dict[str, float]]:
    """Of each arm the mean on test, its gain over a plain arm, and that as a share of the ceiling's."""
    found: dict[str, dict[str, float]] = {}
    ceiling = books.mean(books.paired(book.values(plain), book.values(CEILING)))
    for name in ARMS:
        if not book.values(name):
            continue
        gain = books.mean(books.paired(book.values(plain), book.values(name)))
        found[name] = {"test": books.mean(book.values(name).values()), "gain": gain, "share": gain / ceiling}
    return found


def draw(book: Book) -> None:
    if not all(book.values(name) for name in (PLAIN, COMPUTE, CEILING, DEFAULT)) or "setting" not in book.facts:
        print("crosstok: the baselines are not there yet")
        return
    plain = better_plain(book)
    book.facts["figures"] = figures(book, plain)
    book.write()
    head = ["arm", "terms", "test bits per byte", "against the better plain arm", "share of the ceiling's gain"]
    rows = [[*head, "learning rate", "best step", "CPU s"]]
    for name, arm in ARMS.items():
        lines = book.lines(name)
        if not lines:
            continue
        is_plain = name in (PLAIN, COMPUTE)
        terms = ", ".join(f"{key.split('.')[0]} {weight:g}" for key, weight in arm.objectives.items() if weight)
        differences = books.paired(book.values(name), book.values(plain))
        rows.append(
            [
                name,
                terms,
                books.told(book.values(name).values()),
                "" if name == plain else books.told(differences, is_signed=True),
                "" if is_plain else f"{book.facts['figures'][name]['share']:.0%}",
                f"{next(iter(lines.values()))['job']['learning_rate']:g}",
                f"{books.mean(line['best_step'] for line in lines.values()):.0f}",
                f"{books.mean(line['cpu_seconds'] for line in lines.values()):.1f}",
            ]
        )
    books.save_table(book, "Two tokenizers", [*_notes(book, plain), books.markdown(rows)])


def _notes(book: Book, plain: str) -> list[str]:
    facts, cost = book.facts["setting"], book.facts["cost"]
    coverage, teachers, sizes = facts["coverage"], facts["teachers"], facts["teacher_parameters"]
    targets = facts["transfer_targets"]
    differences = books.paired(book.values(DEFAULT), book.values(plain))
    is_met = books.is_beyond(differences, -1)
    return [
        __doc__.split("\n\n")[2].replace("\n", " "),
        "Held-out bits per byte (test), mean \u00b1 sd over three seeds, differences paired by seed; rates "
        "and the best student of a run are chosen on dev, each arm from rates a factor of three apart, until the best "
        f"has a worse one on either side or is the end of {LADDER[0]:g} to {LADDER[-1]:g}. "
        f"{facts['transfer_bytes']:,} bytes are {targets[SENTENCE_PIECE]:,} targets of the student and "
        f"{targets[BYTE_LEVEL]:,} of the teacher; {coverage['share']:.1%} of the bytes are in spans, "
        f"{coverage['one_to_one_share']:.1%} in spans of one token each.",
        f"Teachers: {teachers[BYTE_LEVEL]:.4f} with the other tokenizer ({sizes[BYTE_LEVEL]:,} parameters), "
        f"{teachers[SENTENCE_PIECE]:.4f} with the student's ({sizes[SENTENCE_PIECE]:,}). The student has "
        f"{facts['student_parameters']:,} parameters and {facts['student_before']:.4f} before; after surgery "
        f"{facts['surgery_parameters']:,} and {facts['surgery_before']:.4f}. A step of the default with a live teacher "
        f"costs {cost['ratio']:.2f} plain steps ({1e3 * cost['taught']:.1f} against {1e3 * cost['plain']:.1f} ms of "
        "one core); plain training for equal compute has that many more.",
        f"Bar: the default beats the better plain arm ({plain}) on every seed and beyond twice the standard error: "
        f"{books.told(differences, is_signed=True)}, {'met' if is_met else 'MISSED'}; "
        f"{book.facts['figures'][DEFAULT]['share']:.0%} of the ceiling's gain over it.",
    ]


if __name__ == "__main__":
    books.main(__doc__, "crosstok", sweep, draw)
