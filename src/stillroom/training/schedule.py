"""Schedule the learning rate and the weights of the terms, counted in applied optimizer steps.

A window of micro-batches is one optimizer step. Windows do not cross epochs; the last one of an epoch may be partial
and is applied like any other, with the mean over its own tokens. So an epoch of 74,823 batches at accumulation 16 has
ceil(74,823 / 16) = 4,677 optimizer steps, and a warm-up of 10 % is 467.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from stillroom.config.schema import Config, PhaseConfig, Ramp, Scalar
from stillroom.core.types import LossWeights

Shape = Literal["cosine", "linear", "constant", "wsd"]


def windows_in(num_batches: int, accumulation: int) -> int:
    """Optimizer steps of one epoch, the last partial window included."""
    return -(-num_batches // accumulation)


def steps_of_run(num_batches: int, accumulation: int, epochs: float, max_steps: int) -> int:
    """Optimizer steps of the run: `max_steps` if given, else those of the epochs."""
    if max_steps:
        return max_steps
    return max(1, math.ceil(windows_in(num_batches, accumulation) * epochs))


def warmup_of_run(num_steps: int, warmup_steps: int, warmup_ratio: float, max_share: float = 1.0) -> int:
    """Warm-up in optimizer steps. An explicit number wins, within `max_share`; it is always shorter than the run."""
    wanted = min(warmup_steps or int(num_steps * warmup_ratio), int(num_steps * max_share))
    return min(wanted, max(num_steps - 1, 0))


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a shape that ends at `floor`. Factors are relative to the peak learning rate."""

    num_steps: int
    num_warmup: int
    shape: Shape = "cosine"
    floor: float = 0.0
    decay_ratio: float = 0.2  # of all steps, at the end of a `wsd`

    @staticmethod
    def of(config: Config, num_batches: int, num_processes: int = 1) -> Schedule:
        """Plan the steps and the warm-up of a run whose epoch has `num_batches` micro-batches."""
        train = config.train
        accumulation = train.gradient_accumulation_steps * num_processes
        num_steps = steps_of_run(num_batches, accumulation, train.epochs, train.max_steps)
        return Schedule(
            num_steps=num_steps,
            num_warmup=warmup_of_run(num_steps, train.warmup_steps, train.warmup_ratio, train.max_warmup_share),
            shape=train.schedule,
            floor=train.min_learning_rate_ratio,
            decay_ratio=train.decay_ratio,
        )

    def factor(self, applied: int) -> float:
        """The factor for the step after `applied` steps.

        The first step of a warm-up is 1/num_warmup, not 0, which would be a step without effect.
        """
        if applied < self.num_warmup:
            return (applied + 1) / self.num_warmup
        if self.shape == "constant":
            return 1.0
        # wsd has the same rates in a longer run until its decay begins, so its checkpoints can be continued.
        stable = int(self.num_steps * (1.0 - self.decay_ratio)) if self.shape == "wsd" else 0
        begin = max(self.num_warmup, stable)
        share = min(max(applied - begin, 0) / max(self.num_steps - begin, 1), 1.0)
        if self.shape == "linear":
            return 1.0 - (1.0 - self.floor) * share
        if self.shape == "wsd":  # one minus the square root: lower losses than a line (Hagele et al. 2024)
            return 1.0 - (1.0 - self.floor) * math.sqrt(share)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * share))


# ---- The curriculum: the weight of each term as a pure function of the run's progress
#
# Progress is the share of *applied* optimizer steps, so training and the evaluation that follows use the same loss
# weights, whatever the accumulation or the number of skipped steps.


NO_PHASE = "constant"  # the name of a run without phases


def value_at(scalar: Scalar, progress: float) -> float:
    """The value of a constant or a ramp at `progress` in [0, 1]."""
    if not isinstance(scalar, Ramp):
        return float(scalar)
    if progress <= scalar.begin and progress < scalar.until:
        return scalar.start
    if progress >= scalar.until:
        return scalar.end
    if scalar.shape == "step":
        return scalar.start
    share = (progress - scalar.begin) / (scalar.until - scalar.begin)
    if scalar.shape == "cosine":
        share = 0.5 - 0.5 * math.cos(math.pi * share)
    return scalar.start + share * (scalar.end - scalar.start)


@dataclass(frozen=True)
class Curriculum:
    """Weights and settings over a run."""

    weights: Mapping[str, Scalar]
    settings: Mapping[str, Scalar]
    phases: tuple[PhaseConfig, ...] = ()
    unaided: frozenset[str] = frozenset({"ce"})  # terms that need no teacher

    @staticmethod
    def of(config: Config) -> Curriculum:
        """The weights and settings of the configuration's objectives."""
        sections = config.objectives.sections
        weights = config.objectives.weights
        return Curriculum(
            weights=weights,
            settings={
                f"{name}.{setting}": value for name in weights for setting, value in sections[name].settings.items()
            },
            phases=config.curriculum.phases,
            unaided=frozenset(name for name in weights if not sections[name].needs_teacher),
        )

    def at(self, progress: float) -> LossWeights:
        progress = min(max(progress, 0.0), 1.0)
        return LossWeights(
            phase=self.phase_at(progress),
            weights={name: value_at(scalar, progress) for name, scalar in self.weights.items()},
            settings={name: value_at(scalar, progress) for name, scalar in self.settings.items()},
            unaided=self.unaided,
        )

    def phase_at(self, progress: float) -> str:
        for phase in self.phases:
            if progress < phase.until:
                return phase.name
        return self.phases[-1].name if self.phases else NO_PHASE

    @property
    def uses_teacher(self) -> bool:
        """Whether the teacher is needed at any time of the run."""
        return any(weight != 0.0 for name, weight in self.weights.items() if name not in self.unaided)

    def without_teacher(self) -> Curriculum:
        """The same run on labels alone: all weight goes to cross-entropy."""
        return replace(self, weights={"kd": 0.0, "ce": 1.0})

    def with_weights(self, weights: Mapping[str, float], step: int) -> Curriculum:
        """The same run with the weights of some terms set after `step` steps.

        It is another phase, so that the guard begins its statistics again and the log names the change.
        """
        suffix = f"weights set at step {step}"
        phases = tuple(phase.model_copy(update={"name": f"{phase.name}, {suffix}"}) for phase in self.phases)
        last = PhaseConfig(name=suffix, until=1.0)
        return replace(self, weights={**self.weights, **weights}, phases=phases or (last,))


# ---- The budget: what a run spends next to its steps, planned before it begins
#
# By counts alone (steps, tokens, parameters), never by a clock: evaluations choose the student that is kept, so a
# resumed run and another machine must plan alike. Work is counted in operations: two for each parameter and token of a
# forward pass, and a backward pass is two forward passes.


_SHARE = 0.10  # of the work of the steps, for everything next to them
_LEAST_WORK = 5e12  # what any run may spend, but not more than its steps: about a minute of one core
_FIRST_SHARE = 0.01  # of the steps' work, for the first evaluation, in which the teacher runs too
_LEAST_FIRST = 1.3e12  # what the first evaluation may take in any run: about a quarter of a minute of one core
_EVALUATIONS_SHARE, _SAMPLES_SHARE = (
    0.5,
    0.1,
)  # of the budget; the rest is for checks, checkpoints and the student's file
_FREE_WORK = 5e10  # below this nothing is shortened: loading takes longer
_MOST_EVALUATIONS = 10
_WRITTEN = 14  # a token that is written reads all weights by itself: it costs as much as so many that are read
_LEAST_TOKENS = 8  # of a sample


@dataclass(frozen=True)
class Work:
    """The counts that a budget is planned from."""

    num_steps: int
    step_tokens: float
    batch_tokens: float  # of one held-out batch
    num_batches: int  # of all held-out data
    student: int  # parameters
    teacher: int = 0  # of a teacher that runs; 0 where stored answers stand for it
    teacher_head: int = 0  # of these, what is multiplied again with hidden states that were kept
    written_tokens: int = 0  # by the student at each evaluation, as answers to prompts

    @property
    def steps(self) -> float:
        return 2.0 * self.num_steps * self.step_tokens * (3 * self.student + self.teacher)

    @property
    def first_batch(self) -> float:
        """One batch of the first evaluation."""
        return 2.0 * self.batch_tokens * (self.student + self.teacher)

    @property
    def later_batch(self) -> float:
        """One batch of any later one, for which the teacher's answers are kept."""
        return 2.0 * self.batch_tokens * (self.student + self.teacher_head)

    @property
    def answers(self) -> float:
        """The prompts that are answered at an evaluation."""
        return 2.0 * _WRITTEN * self.written_tokens * self.student

    @property
    def allowed(self) -> float:
        """What may be spent next to the steps: a tenth, more in short runs, and never more than the steps."""
        return min(self.steps, max(_SHARE * self.steps, _LEAST_WORK))


@dataclass(frozen=True)
class Budget:
    """How much is evaluated and written as samples, and when."""

    num_batches: int  # held-out batches of an evaluation; 0: all
    eval_steps: int  # between evaluations; the last step is always evaluated
    num_samples: int = 0
    sample_tokens: int = 0
    note: str = ""  # what was shortened; empty where nothing was


def plan_budget(
    work: Work, *, max_batches: int | None, eval_steps: int, num_samples: int, sample_tokens: int
) -> Budget:
    """Plan what a run spends next to its steps.

    `max_batches` None and `eval_steps` 0 are chosen; samples are at most as many and as long as asked for.
    """
    for_evaluations = max(_EVALUATIONS_SHARE * work.allowed, _FREE_WORK)
    chosen = work.num_batches if max_batches is None else min(max_batches or work.num_batches, work.num_batches)
    wished = math.ceil(work.num_steps / (eval_steps or 10))
    wished = wished if eval_steps else min(wished, _MOST_EVALUATIONS // 2)  # half of them on twice as much text
    if max_batches is None:
        first = max(_FIRST_SHARE * work.steps, min(_LEAST_FIRST, for_evaluations))
        all_of_them = work.first_batch + wished * work.later_batch
        affordable = min(for_evaluations / max(all_of_them, 1.0), first / max(work.first_batch, 1.0))
        chosen = min(max(1, int(affordable)), work.num_batches)
    left = for_evaluations - chosen * work.first_batch - work.answers
    affordable = max(1, min(_MOST_EVALUATIONS, int(left / max(chosen * work.later_batch + work.answers, 1.0))))
    every = eval_steps or max(1, math.ceil(work.num_steps / affordable))
    tokens = max(_SAMPLES_SHARE * work.allowed, _FREE_WORK) / max(2.0 * _WRITTEN * (work.student + work.teacher), 1.0)
    samples = min(num_samples, max(1, int(tokens) // _LEAST_TOKENS))
    length = min(sample_tokens, max(_LEAST_TOKENS, int(tokens / max(samples, 1))))
    said = []
    if chosen < work.num_batches and max_batches is None:
        said.append(f"evaluations read {chosen:,} of {work.num_batches:,} held-out batches, rows evenly spread")
    if not eval_steps and every > max(1, math.ceil(work.num_steps / _MOST_EVALUATIONS)):
        said.append(f"the student is evaluated every {every:,} steps")
    if (samples, length) != (num_samples, sample_tokens) and num_samples:
        said.append(f"{samples:,} samples of {length:,} tokens")
    share = work.allowed / max(work.steps, 1.0)
    note = "; ".join(said) and (
        f"{'; '.join(said)}: evaluations and samples may take {share:.0%} of the work of the steps. To change it set "
        "eval.max_batches, train.eval_steps or eval.samples; `stillroom eval RUN` reads all held-out data"
    )
    is_all = chosen >= work.num_batches
    return Budget(0 if is_all else chosen, every, samples, length, note)
