"""Cut from the teacher or drawn at random: where a student begins, and whether it is then taught.

python benchmarks/quality/bench_shrink.py

The student has one of the teacher's two layers at half its width. Four arms at equal tokens: begun at random or cut
from the teacher, then trained with cross-entropy or distilled; and plain training at equal compute from both starts.
"""

from __future__ import annotations

import functools
from typing import Any

import bench_transfer
import book as books
import lab
import nets
import standard
import texts
from book import Book
from stillroom.models.attention import attend_causally

from stillroom.config.schema import ShrinkConfig
from stillroom.data import fixed_batches
from stillroom.models.shrink.cut import cut

SIZES = (81_920, 819_200)
TEACHER = nets.TeacherName("dense")
WANTED = {"layers": 1, "method": "even", "width": 32, "mlp_width": 176, "heads": 2}


@functools.cache
def cut_student() -> Any:
    looked_at = fixed_batches(texts.domain("python").train, 64, 16)
    model = cut(nets.teacher_model(TEACHER), ShrinkConfig(**WANTED), looked_at).model
    model.config.use_cache = False
    attend_causally(model)
    return model.requires_grad_(True)


def random_student(seed: int) -> Any:
    """The same shape as the cut one, drawn from the seed."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = type(cut_student())(cut_student().config)
    attend_causally(model)
    return model


def from_cut(job: lab.Job) -> books.Line:
    return lab.run(job, cut_student())


def from_random(job: lab.Job) -> books.Line:
    return lab.run(job, random_student(job.seed))


STARTS = {"random": from_random, "cut": from_cut}
LESSONS = {"ce": "plain, equal tokens", "ce-compute": "plain, equal compute", "kd": "distilled"}


def sweep(book: Book) -> None:
    ratio = book.fact("cost", bench_transfer.cost_ratio)["ratio"]
    book.fact("untrained", lambda: lab.judge(cut_student(), TEACHER, "python"))
    book.fact("parameters", lambda: nets.num_parameters(cut_student()))
    for size in SIZES:
        for start, work in STARTS.items():
            for lesson in LESSONS:
                steps = round(standard.STEPS * (ratio if lesson == "ce-compute" else 1.0))
                objectives = {"kd.weight": 1.0} if lesson == "kd" else lab.PLAIN

                def make(rate: float, seed: int, steps: int = steps, objectives: Any = objectives, size: int = size):
                    return lab.Job(
                        objectives=objectives, learning_rate=rate, steps=steps, seed=seed, transfer_tokens=size
                    )

                book.tuned(f"{start}, {lesson}", make, work=work, size=size)


def draw(book: Book) -> None:
    rows = [["tokens", "lesson", "begun at random", "cut from the teacher", "cut - random"]]
    for size in sorted({line["size"] for line in book.runs}):
        for lesson, label in LESSONS.items():
            values = [book.values(f"{start}, {lesson}", size=size) for start in STARTS]
            gain = books.told(books.paired(values[1], values[0]), is_signed=True)
            rows.append([f"{size:,}", label, *(books.told(found.values()) for found in values), gain])
    parts = [
        "Held-out cross-entropy (test, nats a token), mean \u00b1 sd over seeds, differences paired by seed, 800 "
        "steps: "
        "every arm with its own learning rate by the same rule. A cut student is the same for every seed: its seeds "
        "differ in the order of the text alone.",
        books.markdown(rows),
        f"{book.facts['parameters']:,} parameters. Cut and not trained at all, the student's loss is "
        f"{book.facts['untrained']['test']:.3f}.",
    ]
    books.save_table(book, "A student cut from its teacher, or begun at random", parts)


if __name__ == "__main__":
    books.main(__doc__, "shrink", sweep, draw)
