"""What a run costs: tokens, steps, arithmetic of both models, and time.

Two operations for each weight that a token is multiplied with, twice that again in the backward pass (Kaplan et al.
2020), and attention over the positions before each.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from stillroom.bench.predictions import body_bytes
from stillroom.config import Config
from stillroom.config.schema import ends
from stillroom.precision.gpus import Gpu, Kernels, seconds_of
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
    seconds_per_step_compiled: float | None = None  # of a modelled GPU: with the bodies of both models compiled
    seconds_per_step_at_peak: float | None = None  # the same as seconds_per_step by the data sheet
    can_be_cached: bool = True  # the teacher is not the student's own network

    @property
    def ratio(self) -> float:
        """Teacher over student."""
        return self.teacher_flops_per_token / self.student_flops_per_token

    @property
    def cached_over_live(self) -> float | None:
        """Arithmetic of this run with stored answers over that with a live teacher: the teacher reads each text once.

        At one pass both are the same, so a cache pays from the second pass, or the second run, on the same data.
        """
        if self.passes is None or not self.teacher_flops_per_token or not self.can_be_cached:
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
    asked = 0.0 if config.teacher.cache else teaching
    seconds, source = measured, "one real step, measured on this machine" if measured is not None else ""
    compiled = at_peak = None
    if measured is None and gpu is not None:
        live = teacher if not config.teacher.cache else None
        work = {
            form: step_kernels(config, layout, live, per_step, (asked, student), form) for form in ("eager", "compiled")
        }
        seconds, compiled = (seconds_of(work[form], gpu.sustained) for form in ("eager", "compiled"))
        at_peak = seconds_of(work["eager"], gpu.peak)
        source = f"a model of a {gpu.name} at rates it sustains; no GPU was measured"
    answers, writing = 0.0, None
    if config.rollouts is not None:
        rollouts = config.rollouts
        served = max(ends(rollouts.share)) * train.rows_per_batch * train.gradient_accumulation_steps
        answers = served / (1 + rollouts.keep_rounds)
        if measured_answer is not None:
            writing = answers * measured_answer
        elif measured is None and gpu is not None:
            writing = seconds_of(writing_kernels(config, layout, answers, length), gpu.sustained)
            source += ", which reads all weights for each token that a batch of answers writes"
        seconds = seconds + writing if seconds is not None and writing is not None else seconds
    return Cost(
        steps=steps,
        tokens=steps * per_step if steps else None,
        tokens_per_step=per_step,
        passes=passes,
        teacher_flops_per_token=teaching,
        can_be_cached=not config.teacher.is_student,
        student_flops_per_token=student,
        seconds_per_step=seconds,
        seconds_from=source,
        cache_bytes_per_token=cache_bytes(config),
        answers_per_step=answers,
        writing_seconds_per_step=writing,
        seconds_per_step_compiled=compiled,
        seconds_per_step_at_peak=at_peak,
    )


# Bytes that the row kernel reads and writes for each element of a chunk of logits. In two passes over the student's
# logits alone, stored answers move as many.
_ROW_BYTES, _UPDATE_BYTES = 10.0, 32.0
_LAUNCHES = {"eager": 80, "compiled": 35}  # of a layer, forward and backward


def step_kernels(
    config: Config, layout: Layout, teacher: Sizes | None, tokens: int, flops: tuple[float, float], form: str
) -> list[Kernels]:
    """What a step asks of a GPU: products, what the layers move besides them, rows of the head, and the update.

    What layers move was recorded for Llama layers whose feed-forward has 2.7 widths (`bench/predictions.json`).
    """
    student = layout.sizes
    dtype: Literal["half", "fp32"] = "fp32" if layout.mode == "fp32" else "half"
    wide = 2.0 if layout.mode == "fp32" else 1.0
    moved = tokens * student.layers * student.width * wide
    bodies = moved * (body_bytes(form, "student forward") + body_bytes(form, "student backward"))
    launches = student.layers * _LAUNCHES[form]
    if teacher is not None:
        bodies += tokens * teacher.layers * teacher.width * body_bytes(form, "teacher")
        launches += teacher.layers * _LAUNCHES[form] // 3
    micro_batches = config.train.gradient_accumulation_steps
    return [
        Kernels(1, tokens * sum(flops), dtype, 0.0),
        Kernels(1, 0.0, "half", bodies, launches * micro_batches),
        Kernels(1, 0.0, "half", _ROW_BYTES * tokens * student.vocabulary),
        Kernels(1, 0.0, "half", _UPDATE_BYTES * student.num_trained),
    ]


def writing_kernels(config: Config, layout: Layout, answers: float, length: int) -> list[Kernels]:
    """What writing the answers of a step asks of a GPU: each token of a batch of answers reads every weight once."""
    assert config.rollouts is not None
    dtype: Literal["half", "fp32"] = "fp32" if layout.mode == "fp32" else "half"
    tokens = config.rollouts.most_new_tokens
    passes = tokens * max(1.0, answers / config.rollouts.batch_size) if answers else 0.0
    weights = (4.0 if layout.mode == "fp32" else 2.0) * layout.sizes.parameters
    flops = answers * tokens * forward_flops(layout.sizes, length)
    return [Kernels(1, flops, dtype, passes * weights, int(passes * layout.sizes.layers * _LAUNCHES["eager"] // 3))]
