"""What a run costs: tokens, steps, arithmetic of both models, and time.

Two operations for each weight that a token is multiplied with, twice that again in the backward pass (Kaplan et al.
2020), and attention over the positions before each.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stillroom.config import Config
from stillroom.config.schema import ends
from stillroom.precision.gpus import Gpu
from stillroom.training.memory import Layout, cache_bytes
from stillroom.training.trace import Sizes


@dataclass(frozen=True)
class Cost:
    steps: int | None  # None: not known without counting the data
    tokens: int | None
    tokens_per_step: int
    passes: float | None  # over the training data
    teacher_flops_per_token: float
    student_flops_per_token: float
    seconds_per_step: float | None
    seconds_from: str  # what the time is from; empty where there is none
    cache_bytes_per_token: float
    answers_per_step: float = 0.0  # rollouts that are written for a step, once their share is reached
    writing_seconds_per_step: float | None = None  # part of seconds_per_step

    @property
    def ratio(self) -> float:
        """Teacher over student."""
        return self.teacher_flops_per_token / self.student_flops_per_token

    @property
    def cached_over_live(self) -> float | None:
        """Arithmetic of this run with stored answers over that with a live teacher: the teacher reads each text once.

        At one pass both are the same, so a cache pays from the second pass, or the second run, on the same data.
        """
        if self.passes is None or not self.teacher_flops_per_token:
            return None
        written = min(1.0, self.passes) * self.teacher_flops_per_token
        live = self.passes * (self.teacher_flops_per_token + self.student_flops_per_token)
        return (written + self.passes * self.student_flops_per_token) / live

    def to_dict(self) -> dict[str, Any]:
        seconds = self.seconds_per_step
        return {
            **asdict(self),
            "ratio": self.ratio,
            "cached_over_live": self.cached_over_live,
            "seconds": seconds * self.steps if seconds is not None and self.steps is not None else None,
        }


def forward_flops(sizes: Sizes, length: int) -> float:
    """Operations of one token, head included, in a row of this length."""
    multiplied = sizes.parameters - sizes.embedding - sizes.experts * (1.0 - sizes.visited)
    return 2.0 * multiplied + 2.0 * sizes.layers * length * sizes.width  # half of the positions lie before


def cost_of(
    config: Config,
    layout: Layout,
    *,
    teacher: Sizes | None,
    counted: tuple[int, int] | None = None,
    gpu: Gpu | None = None,
    measured: float | None = None,
    measured_answer: float | None = None,
) -> Cost:
    """`counted` are the steps and tokens of one pass over the data; `measured` the seconds of a real step.

    `measured_answer` are the seconds in which the student writes one answer of a round.
    """
    train, length = config.train, config.data.max_length
    per_step = train.rows_per_batch * train.gradient_accumulation_steps * length
    steps = train.max_steps or None
    passes = None
    if counted is not None:
        steps = train.max_steps or max(1, round(counted[0] * train.epochs))
        passes = steps / counted[0]
    student = forward_flops(layout.sizes, length)
    backward = 1.0 if config.student.adapter is not None else 2.0  # frozen weights have no gradient
    student *= 1.0 + backward + config.student.gradient_checkpointing
    teaching = forward_flops(teacher, length) if teacher is not None else 0.0
    seconds, source = measured, "one real step, measured on this machine" if measured is not None else ""
    if measured is None and gpu is not None:
        asked = 0.0 if config.teacher.cache else teaching
        seconds = per_step * (asked + student) / gpu.flops(layout.mode)
        source = f"a model: all products at the published peak of a {gpu.name}; real steps take longer"
    answers, writing = 0.0, None
    if config.rollouts is not None:
        rollouts = config.rollouts
        served = max(ends(rollouts.share)) * train.rows_per_batch * train.gradient_accumulation_steps
        answers = served / (1 + rollouts.keep_rounds)
        if measured_answer is not None:
            writing = answers * measured_answer
        elif measured is None and gpu is not None:
            writing = answers * rollouts.most_new_tokens * forward_flops(layout.sizes, length) / gpu.flops(layout.mode)
            source += ", and writing, which reads all weights for each token, many times longer"
        seconds = seconds + writing if seconds is not None and writing is not None else seconds
    return Cost(
        steps=steps,
        tokens=steps * per_step if steps else None,
        tokens_per_step=per_step,
        passes=passes,
        teacher_flops_per_token=teaching,
        student_flops_per_token=student,
        seconds_per_step=seconds,
        seconds_from=source,
        cache_bytes_per_token=cache_bytes(config),
        answers_per_step=answers,
        writing_seconds_per_step=writing,
    )
