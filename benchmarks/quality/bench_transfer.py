"""Where does distillation stop paying? The same student taught, and on its own, over the size of the transfer set.

    python benchmarks/quality/bench_transfer.py          # run what is missing, then draw
    python benchmarks/quality/bench_transfer.py draw

Three arms at each size, each with its own learning rate and its best checkpoint by dev: forward KL to the teacher;
cross-entropy on as many tokens; cross-entropy for as many CPU seconds as the taught run takes with a live teacher. A
set that the run outlasts is passed over again; one larger than 819,000 tokens is passed over once. With all of the text
each arm has the learning rate that was best for it on 1.3 million tokens.
"""

from __future__ import annotations

import statistics

import book as books
import lab
import texts
from book import Book

# Tokens; 0 is all the training text. In the order of what is most worth knowing: an interrupted sweep has the ends.
SIZES = (5_120, 327_680, 20_480, 1_310_720, 0, 81_920)
ARMS = {"kd": "distilled", "ce": "plain, equal tokens", "ce-compute": "plain, equal compute"}
BASE_STEPS = 800
CHECKS = 10


def num_tokens(size: int) -> int:
    return size or len(texts.transfer_set("python", 0)) * texts.LENGTH


def num_steps(size: int) -> int:
    return max(BASE_STEPS, num_tokens(size) // texts.TOKENS_A_STEP)


def cost_ratio() -> dict[str, float]:
    """CPU seconds of a step with a live teacher, of one without, and how many of these the first is worth."""
    found = {}
    for arm, objectives in (("kd", {"kd.weight": 1.0}), ("ce", lab.PLAIN)):
        job = lab.Job(objectives=objectives, steps=100, transfer_tokens=20_480, is_live=True, checks=1)
        found[arm] = statistics.median(lab.run(job)["cpu_seconds"] / job.steps for _ in range(3))
    return {"kd_step": found["kd"], "ce_step": found["ce"], "ratio": found["kd"] / found["ce"]}


def sweep(book: Book) -> None:
    ratio = book.fact("cost", cost_ratio)["ratio"]
    for size in SIZES:
        for arm in ARMS:
            steps = round(num_steps(size) * (ratio if arm == "ce-compute" else 1.0))
            objectives = {"kd.weight": 1.0} if arm == "kd" else lab.PLAIN

            def make(rate: float, seed: int, steps: int = steps, objectives: dict = objectives, size: int = size):
                return lab.Job(
                    objectives=objectives,
                    learning_rate=rate,
                    steps=steps,
                    seed=seed,
                    transfer_tokens=size,
                    checks=CHECKS,
                )

            rates = books.RATES
            if size == 0:  # five times the work of any other size: at the rate that was best on the next smaller one
                nearest = book.lines(arm, size=max(SIZES))
                rates = (next(iter(nearest.values()))["job"]["learning_rate"],)
            book.tuned(arm, make, rates=rates, size=num_tokens(size))


def sizes_in(book: Book) -> list[int]:
    return sorted({line["size"] for line in book.runs})


def verdict(differences: list[float]) -> str:
    if books.is_beyond(differences, -1):
        return "distillation"
    return "plain training" if books.is_beyond(differences, +1) else "neither"


def draw(book: Book) -> None:
    rows = [["tokens", "steps", *ARMS.values(), "KD - CE, tokens", "KD - CE, compute", "pays at equal compute"]]
    for size in sizes_in(book):
        taught = book.values("kd", size=size)
        plain, longer = book.values("ce", size=size), book.values("ce-compute", size=size)
        if not longer:
            continue
        steps = next(iter(book.lines("kd", size=size).values()))["job"]["steps"]
        against = books.paired(taught, longer)
        rows.append(
            [
                f"{size:,}",
                f"{steps:,}",
                *(books.told(found.values()) for found in (taught, plain, longer)),
                books.told(books.paired(taught, plain), is_signed=True),
                books.told(against, is_signed=True),
                verdict(against),
            ]
        )
    chosen = [["tokens", *ARMS.values()]]
    for size in sizes_in(book):
        cells = []
        for arm in ARMS:
            lines = list(book.lines(arm, size=size).values())
            if lines:
                last = lines[0]["job"]
                cells.append(
                    f"{last['learning_rate']:g}, best at {books.mean(x['best_step'] for x in lines):.0f} "
                    f"of {last['steps']}, {books.mean(x['agreement'] for x in lines):.1%} agreement"
                )
        chosen.append([f"{size:,}", *cells, *[""] * (len(ARMS) - len(cells))])
    cost = book.facts["cost"]
    parts = [
        "Held-out cross-entropy (test, nats a token, lower is better), mean \u00b1 sd over seeds; differences are "
        'paired by seed. "Pays" is said where every seed agrees and the mean is beyond twice its standard error.',
        books.markdown(rows),
        f"A step with a live teacher costs {cost['ratio']:.2f} plain steps "
        f"({1000 * cost['kd_step']:.1f} against {1000 * cost['ce_step']:.1f} ms of one core).",
        "Learning rate chosen on dev, the step of the best student, and how often it says what the teacher says:",
        books.markdown(chosen),
    ]
    books.save_table(book, "Distillation against plain training over the size of the transfer set", parts)
    _figure(book)


def _figure(book: Book) -> None:
    figure, axes = books.axes()
    for (arm, label), colour in zip(ARMS.items(), books.COLOURS, strict=False):
        points = {size: book.values(arm, size=size).values() for size in sizes_in(book)}
        books.curve(axes, points, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("tokens in the transfer set")
    axes.set_ylabel("held-out loss, nats a token")
    axes.set_title("A student of 21,000 parameters, taught or on its own", loc="left", fontsize=11)
    axes.legend(frameon=False)
    books.save_figure(book, figure)


if __name__ == "__main__":
    books.main(__doc__, "transfer", sweep, draw)
