"""Does it help the student to train the gates of a mixture-of-experts teacher?

    python benchmarks/quality/router/bench_router.py           # every regime, then the tables
    python benchmarks/quality/router/bench_router.py draw

Every arm is paired by seed with the frozen teacher: same student, same order of the text. Two controls stand beside
every student-aware mode: `truth` (the same training without the student's term) and `anti-sar` (the student's term
with its sign turned). A claim for student-awareness must beat both. Two things are chosen on dev with the first seed:
the weight of distillation beside cross-entropy, with the frozen teacher; then the gates' learning rate, one or three
times the student's, for `truth`. Every arm uses them.
"""

from __future__ import annotations

import copy
import functools
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import book as books
import lab
import nets
import texts
import torch
import verdicts
from book import Book
from regimes import REGIMES, warm_student

from stillroom.config.schema import RouterConfig
from stillroom.core.types import Score
from stillroom.data import Loader, fixed_batches
from stillroom.losses.mix import Mix
from stillroom.models import Student
from stillroom.precision import resolve
from stillroom.teachers.router.gates import GateOptions
from stillroom.teachers.router.teacher import RouterTeacher
from stillroom.teachers.router.terms import both_ways, lookahead_direction
from stillroom.training.schedule import Curriculum, Schedule

RESULTS = Path(__file__).parent / "results"
ALARMS = 6  # times a run looks at its teacher's held-out loss, on 128 rows of dev
NEVER = 1e9  # an alarm that cannot go off
ARMS: dict[str, dict[str, Any]] = {
    "all-experts": {"mode": "all-experts"},
    "knowledge-augmentation": {"mode": "knowledge-augmentation"},
    "truth": {"mode": "truth", "anchor_weight": 0.0},
    "sar": {"mode": "sar", "student_weight": 0.3, "anchor_weight": 0.0},
    "anti-sar": {"mode": "sar", "student_weight": -0.3, "anchor_weight": 0.0},
    "sar as shipped": {"mode": "sar"},
    "sar-joint": {"mode": "sar-joint"},
    "sar unguarded": {
        "mode": "sar", "student_weight": 1.0, "truth_weight": 0.0, "anchor_weight": 0.0, "max_degradation": NEVER,
    },
    "sar-joint unguarded": {
        "mode": "sar-joint", "student_weight": 1.0, "truth_weight": 0.0, "anchor_weight": 0.0, "max_degradation": NEVER,
    },
    "sar-transient": {"mode": "sar-transient", "student_weight": 1.0, "truth_weight": 0.0},
    "anti-transient": {"mode": "sar-transient", "student_weight": -1.0, "truth_weight": 0.0},
    "sar-meta": {"mode": "sar-meta", "anchor_weight": 0.0},
}  # fmt: skip
_TRAINS = ("truth", "sar", "sar-joint", "sar-meta")
FACTORS = (1.0, 3.0)  # times the student's learning rate
WEIGHTS = (0.3, 0.5, 0.7, 1.0)  # of distillation


@dataclass(frozen=True)
class RouterJob(lab.Job):
    """A run with a teacher whose gates may be trained."""

    regime: str = ""
    router: Mapping[str, Any] = field(default_factory=dict)
    router_rate: float = 0.0


def make(name: str, router: Mapping[str, Any], seed: int, weight: float, factor: float = 1.0) -> RouterJob:
    """A regime's job at a weight of distillation; at 0 there is no teacher."""
    regime = REGIMES[name]
    if router.get("mode") == "sar-meta":  # its term is in nats a student step, so it is weighed by steps
        router = {**router, "student_weight": 1 / regime.rate}
    return RouterJob(
        objectives={"kd.weight": weight, "ce.weight": round(1 - weight, 6)},
        learning_rate=regime.rate,
        steps=regime.steps,
        seed=seed,
        domain=regime.domain,
        transfer_tokens=regime.tokens,
        teacher=regime.teacher,
        regime=name,
        router=dict(router),
        router_rate=regime.rate * factor if router.get("mode") in _TRAINS else 0.0,
    )


def sweep(book: Book) -> None:
    for name, regime in REGIMES.items():
        weight = regime.kd_weight or tuned_weight(book, name)
        for seed in books.SEEDS:
            book.run("plain", make(name, {}, seed, 0.0), run, regime=name)
            book.run("frozen", make(name, {"mode": "frozen"}, seed, weight), run, regime=name)
        tried = {
            factor: book.run("truth", make(name, ARMS["truth"], 0, weight, factor), run, regime=name)
            for factor in FACTORS
        }
        factor = min(tried, key=lambda factor: tried[factor]["dev"])
        for arm in regime.arms:
            for seed in books.SEEDS:
                book.run(arm, make(name, ARMS[arm], seed, weight, factor), run, regime=name)


def tuned_weight(book: Book, name: str) -> float:
    """The weight of distillation at which the frozen teacher's student is best on dev."""
    tried = {
        weight: book.run("weight", make(name, {"mode": "frozen"}, 0, weight), run, regime=name, weight=weight)["dev"]
        for weight in WEIGHTS
    }
    return min(tried, key=lambda weight: tried[weight])


def run(job: RouterJob) -> books.Line:
    """The product's step with a router, by hand, as `training/step.py` has it."""
    torch.set_num_threads(1)
    regime = REGIMES[job.regime]
    model = copy.deepcopy(warm_student(regime.student, job.seed, regime.warm_steps)).requires_grad_(True)
    teacher = None
    if job.uses_teacher:
        teacher = RouterTeacher(
            nets.teacher_model(job.teacher),
            RouterConfig(**job.router),
            vocab_size=texts.VOCAB,
            device=nets.CPU,
            options=GateOptions(learning_rate=job.router_rate or job.learning_rate),
            is_described=True,
            seed=job.seed,
        )
    seconds = _train(job, model, teacher)
    found = {
        **lab.judge(model, job.teacher, job.domain),
        "dev": lab.held_out(Student(model, vocab_size=texts.VOCAB, is_described=True), texts.domain(job.domain).dev),
        "start": start_loss(regime.student, job.seed, regime.warm_steps, job.domain),
        "cpu_seconds": round(seconds, 3),
    }
    if teacher is not None:
        after = teacher.assess(fixed_batches(texts.domain(job.domain).test, 64))
        found |= {
            "teacher_before": teacher_loss(job.teacher, job.domain),
            "teacher_after": after.nll,
            "teacher_moved": after.kl_to_original,
            "is_taken_back": teacher.is_frozen,
            "skipped": teacher.gates.num_skipped,
        }
    return found


@functools.cache
def start_loss(kind: str, seed: int, warm_steps: int, domain: str) -> float:
    student = Student(warm_student(kind, seed, warm_steps), vocab_size=texts.VOCAB, is_described=True)
    return lab.held_out(student, texts.domain(domain).test)


@functools.cache
def teacher_loss(name: nets.TeacherName, domain: str) -> float:
    return lab.held_out(
        Student(nets.teacher_model(name), vocab_size=texts.VOCAB, is_described=True), texts.domain(domain).test
    )


def _train(job: RouterJob, model: Any, teacher: RouterTeacher | None) -> float:
    config = job.config()
    student = Student(model, vocab_size=texts.VOCAB, is_described=True)
    precision = resolve("fp32")
    optimizer = nets.optimizer_of(model, precision, config)
    loader = Loader(texts.transfer_set(job.domain, job.transfer_tokens), batch_size=texts.BATCH, seed=job.seed)
    schedule, curriculum, mix = Schedule.of(config, loader.num_batches), Curriculum.of(config), Mix(config.objectives)
    watched = list(fixed_batches(texts.domain(job.domain).dev, 64, 2))
    if teacher is not None:
        teacher.training.start(watched)
    looks = {round(job.steps * (number + 1) / ALARMS) for number in range(ALARMS)}
    spent, begin = 0.0, time.process_time()
    student.train()
    for step in range(job.steps):
        [batch] = loader.window(step)
        loss_weights = curriculum.at(step / job.steps)
        counts = mix.counts([batch])
        if teacher is None:
            lab.score_batch(student, None, mix, loss_weights, counts, batch, precision)
        else:
            teacher.training.begin([batch], step)
            direction = None
            if teacher.config.mode == "sar-meta" and teacher.training.is_due:  # look at the next batch: no other text
                ahead = loader.window(step + 1)[0]
                direction = lookahead_direction(student, optimizer, precision, ahead, job.learning_rate)
            _learn(student, teacher, mix, loss_weights, counts, batch, precision, direction)
        norm = float(optimizer.squared_norms()["student"].sqrt())
        factor = schedule.factor(step)
        if teacher is not None:
            teacher.training.update_gates(is_kept=True, rate_factor=factor)
        precision.step(optimizer, factor, {"student": min(1.0, config.train.max_grad_norm / norm)})
        optimizer.zero_grad()
        if teacher is not None and step + 1 in looks:
            spent += time.process_time() - begin
            teacher.training.watch(teacher.assess(watched))
            begin = time.process_time()
    return spent + time.process_time() - begin


def _learn(
    student: Student, teacher: RouterTeacher, mix: Mix, loss_weights: Any, counts: dict[str, int], batch: Any,
    precision: Any, direction: Any,
) -> None:  # fmt: skip
    needs = mix.needs(loss_weights)
    with teacher.training.joint_graph(batch):
        answers = teacher.training.answers(batch, needs.teacher)
        view = student.observe(batch, needs.student)
        signals = teacher.training.signals_after_student(answers, batch, view, needs.teacher)
        score = Score.average([mix.score(view, signal, batch, loss_weights, counts) for signal in signals])
        precision.backward(score.loss + teacher.training.extra_loss(batch, view, num_targets=counts["ce"]))
    opposite = None
    if teacher.config.mode == "sar-meta":
        if not direction:
            return  # before the student's first update there is no step to look along
        view, opposite = both_ways(student, precision, batch, direction)
    teacher.training.learn(batch, view, num_targets=counts["ce"], opposite=opposite)


def draw(book: Book) -> None:
    verdicts.draw(book, {name: regime.label for name, regime in REGIMES.items()}, list(ARMS))


if __name__ == "__main__":
    books.main(__doc__, "router", sweep, draw, RESULTS)
