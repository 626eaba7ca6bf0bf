"""One run of the laboratory: a small student, a teacher or none, and the product's own score and update.

A run is described by a `Job` and is a pure function of it: same job, same numbers, on one thread. Everything that
turns batches into updates is the product's (`Student`, `Mix`, `Curriculum`, `Schedule`, the precision policy and its
AdamW); the laboratory only decides which of them meet. Time is CPU time of the process, so a busy machine does not
change it, and leaves out held-out evaluation.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import nets
import texts
import torch
from nets import TeacherName
from torch import Tensor

from stillroom.config import Config
from stillroom.core.types import LossWeights, Needs
from stillroom.data import Loader, Rows, fixed_batches
from stillroom.losses.mix import Mix, TokenMatch
from stillroom.models import Student
from stillroom.models.anatomy import head_logits
from stillroom.precision import resolve
from stillroom.teachers import Teacher
from stillroom.training.build import make_optimizer
from stillroom.training.evaluate import evaluate
from stillroom.training.models import make_objectives
from stillroom.training.schedule import Curriculum, Schedule

_EVAL_BATCH = 64
_ECE_BINS = 15
_FIRST_CHECK = 20  # steps


@dataclass(frozen=True)
class Job:
    """What a run is made of. Objectives are written as in a configuration file, e.g. {"kd.temperature": 2}."""

    objectives: Mapping[str, Any] = field(default_factory=lambda: {"kd.weight": 1.0})
    learning_rate: float = 1e-2
    steps: int = 800
    seed: int = 0
    domain: str = "python"
    transfer_tokens: int = 0  # 0: all training text
    teacher: TeacherName = field(default_factory=TeacherName)
    is_live: bool = False  # ask the teacher at every step, for timing
    checks: int = 10  # evaluations on dev over the run; the best student of them is reported

    @property
    def uses_teacher(self) -> bool:
        return self.objectives.get("kd.weight", 1.0) != 0

    @property
    def looks_inside(self) -> bool:
        """Whether a term compares the insides of the two models: the teacher must then be there, and be looked at."""
        return bool(self.config().objectives.inner_weights)

    def config(self) -> Config:
        sections: dict[str, dict[str, Any]] = {}
        for name, value in self.objectives.items():
            section, key = name.split(".")
            sections.setdefault(section, {})[key] = value
        train = {
            "learning_rate": self.learning_rate,
            "max_steps": self.steps,
            "batch_size": texts.BATCH,
            "warmup_ratio": 0.05,
            "seed": self.seed,
        }
        return Config(objectives=sections, train=train)


PLAIN = {"kd.weight": 0.0, "ce.weight": 1.0}


@dataclass(frozen=True)
class Lessons:
    """What a run reads: rows to train on, rows to be checked on, and by which yardstick it is checked."""

    train: Rows
    dev: Rows
    vocab_size: int = texts.VOCAB
    yardstick: str = "nll"
    matched: TokenMatch | None = None  # where the teacher reads tokens of its own

    @staticmethod
    def of(job: Job) -> Lessons:
        return Lessons(texts.transfer_set(job.domain, job.transfer_tokens), texts.domain(job.domain).dev)


def run(job: Job, model: Any = None, source: Teacher | None = None) -> dict[str, Any]:
    """Train as the job says and judge the best student of the run on test.

    `model` is where it begins, `source` who answers in the place of the job's teacher.
    """
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    model = nets.draw(nets.STUDENT, job.seed) if model is None else copy.deepcopy(model)
    trained = train(job, model, source or source_of(job))
    model.load_state_dict(trained.best)
    return {
        **judge(model, job.teacher, job.domain),
        "dev": trained.best_dev,
        "last_dev": trained.curve[-1][1],
        "best_step": trained.best_step,
        "cpu_seconds": round(trained.seconds, 3),
        "teacher_forwards": job.steps if job.uses_teacher else 0,
        "curve": trained.curve,
    }


def source_of(job: Job) -> Teacher | None:
    if not job.uses_teacher:
        return None
    if job.looks_inside:  # a copy: showing attention maps changes how a model computes them
        return nets.live(copy.deepcopy(nets.teacher_model(job.teacher)))
    if job.is_live:
        return nets.live(nets.teacher_model(job.teacher))
    return nets.remembered(job.teacher, job.domain, job.transfer_tokens)


@dataclass
class Trained:
    """A finished run: its best student by dev, and how it got there."""

    best: dict[str, Tensor]
    best_dev: float
    best_step: int
    curve: list[tuple[int, float]]  # applied steps, dev loss
    seconds: float


def train(job: Job, model: Any, source: Teacher | None, lessons: Lessons | None = None) -> Trained:
    """The product's step, by hand: score, backward, clip, update."""
    config, lessons = job.config(), lessons or Lessons.of(job)
    student = Student(model, vocab_size=lessons.vocab_size, is_described=True)
    precision = resolve("fp32", config=config.precision)
    planned = make_objectives(config, model, getattr(source, "model", None), nets.CPU, matched=lessons.matched)
    optimizer = make_optimizer(model, precision, config, planned)
    loader = Loader(lessons.train, batch_size=texts.BATCH, seed=job.seed)
    schedule, curriculum, mix = (
        Schedule.of(config, loader.num_batches),
        Curriculum.of(config),
        Mix(config.objectives, planned=planned),
    )
    at_step = check_steps(job.steps, job.checks)
    found = Trained({}, float("inf"), 0, [], 0.0)
    student.train()
    begin = time.process_time()
    for step in range(job.steps):
        window = loader.window(step)
        loss_weights = curriculum.at(step / job.steps)
        counts = mix.counts(window)
        for batch in window:
            score_batch(student, source, mix, loss_weights, counts, batch, precision)
        norms = {name: float(square.sqrt()) for name, square in optimizer.squared_norms().items()}
        if not all(math.isfinite(norm) for norm in norms.values()):
            raise ArithmeticError(f"{job}: the gradient is not finite at step {step + 1}")
        bound = config.train.max_grad_norm
        precision.step(
            optimizer, schedule.factor(step), {name: min(1.0, bound / (norm + 1e-12)) for name, norm in norms.items()}
        )
        optimizer.zero_grad()
        if step + 1 in at_step:
            found.seconds += time.process_time() - begin
            _check(found, student, lessons, step + 1)
            begin = time.process_time()
    return found


def check_steps(steps: int, checks: int) -> set[int]:
    """Where dev is looked at: by equal ratios up to the end, because plain training on a small set is best early."""
    first = min(_FIRST_CHECK, steps)
    return {round(first * (steps / first) ** (number / max(checks - 1, 1))) for number in range(checks)} | {steps}


def score_batch(
    student: Student,
    source: Teacher | None,
    mix: Mix,
    loss_weights: LossWeights,
    counts: Any,
    batch: Any,
    precision: Any,
) -> None:
    needs = mix.needs(loss_weights)
    signal = source.observe(batch, needs.teacher) if source is not None and loss_weights.asks_teacher else None
    with precision.autocast():
        view = student.observe(batch, needs.student)
    precision.backward(mix.score(view, signal, batch, loss_weights, counts).loss)


def _check(found: Trained, student: Student, lessons: Lessons, step: int) -> None:
    loss = held_out(student, lessons.dev, lessons.yardstick)
    found.curve.append((step, round(loss, 5)))
    if loss < found.best_dev:
        found.best_dev, found.best_step = loss, step
        found.best = {name: tensor.detach().clone() for name, tensor in student.model.state_dict().items()}


def held_out(student: Student, rows: Rows, yardstick: str = "nll") -> float:
    found = evaluate(student, fixed_batches(rows, _EVAL_BATCH), precision=resolve("fp32"))
    return float(getattr(found, yardstick))


def judge(model: Any, teacher: TeacherName, domain: str, side: str = "test") -> dict[str, float]:
    """Held-out loss, distance to the teacher and calibration, by the product's own evaluation."""
    student = Student(model, vocab_size=texts.VOCAB, is_described=True)
    rows = getattr(texts.domain(domain), side)
    against = nets.judge(teacher, domain, side)
    result = evaluate(student, fixed_batches(rows, _EVAL_BATCH), precision=resolve("fp32"), teacher=against)
    return {
        side: result.nll,
        "kl": float(result.kl or 0.0),
        "agreement": float(result.agreement or 0.0),
        "ece": calibration_error(student, rows),
    }


@torch.no_grad()
def calibration_error(student: Student, rows: Rows) -> float:
    """Expected calibration error of the likeliest token over equal-width bins (Guo et al. 2017)."""
    student.eval()
    weight, right, sure = (torch.zeros(_ECE_BINS, dtype=torch.float64) for _ in range(3))
    for batch in fixed_batches(rows, _EVAL_BATCH):
        view = student.observe(batch, Needs())
        confidence, guess = torch.softmax(head_logits(view.head, view.hidden), dim=-1).max(dim=-1)
        bins = (confidence * _ECE_BINS).long().clamp_max(_ECE_BINS - 1)
        weight += torch.bincount(bins, minlength=_ECE_BINS)
        right += torch.bincount(bins, (guess == batch.scored_targets).double(), minlength=_ECE_BINS)
        sure += torch.bincount(bins, confidence.double(), minlength=_ECE_BINS)
    return float((right - sure).abs().sum() / weight.sum())
