"""The configuration schema. Imports no torch, so that `stillroom --help` and the doctor are fast.

Each field's description is what a user needs to set it. A number that may change during a run is a `Scalar`: a
constant, or a ramp over the run's progress.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from stillroom.config.data import DataConfig as DataConfig
from stillroom.config.objectives import ObjectivesConfig
from stillroom.config.sections import (
    MOST,
    MOST_FLOAT,
    MOST_ROWS,
    AdapterConfig,
    Count,
    NonNegative,
    Positive,
    Section,
    Size,
    TrainConfig,
)
from stillroom.config.teacher import ModelSection as ModelSection
from stillroom.config.teacher import RouterConfig as RouterConfig
from stillroom.config.teacher import TeacherConfig as TeacherConfig
from stillroom.core.errors import ConfigError

PrecisionMode = Literal["auto", "fp32", "bf16-mixed", "fp16-mixed", "fp16-master", "fp16-split", "fp16-sr"]


class ShrinkConfig(Section):
    layers: Count | tuple[int, ...] = Field(
        0, description="how many of the teacher's layers are kept, or which, counted from 0; 0: all"
    )
    method: Literal["auto", "loss", "influence", "even"] = Field(
        "auto",
        description="how so many layers are chosen. loss: take out one at a time, the one whose absence raises the "
        "loss least; influence: keep those that change the hidden states most; even: at equal steps, without looking "
        "at text; auto: loss where it takes at most 1e14 operations on a CPU, 1e16 on a GPU, else influence",
    )
    choice_tokens: Annotated[int, Field(ge=16, le=MOST)] = Field(
        768, description="tokens of training data that layers are chosen by"
    )
    width: Count = Field(0, description="channels kept, by importance; 0: all")
    mlp_width: Count = Field(0, description="neurons kept in each layer, by importance; 0: all")
    heads: Count = Field(0, description="attention heads kept whole in each layer; 0: all")
    calibration_batches: Size = Field(
        8, description="batches of training data that the importance of widths is measured on"
    )

    @property
    def cuts_width(self) -> bool:
        return bool(self.width or self.mlp_width or self.heads)


class StudentConfig(ModelSection):
    model: str = Field("builtin:student", description="folder, hub id, or builtin:student; not read with init = shrink")
    init: Literal["auto", "pretrained", "random", "shrink"] = Field(
        "auto",
        description="random: take only the configuration; shrink: cut from the teacher as `shrink` says; "
        "auto: random where the folder has no weights",
    )
    shrink: ShrinkConfig = Field(default_factory=ShrinkConfig)
    vocabulary: Literal["own", "teacher"] = Field(
        "own",
        description="teacher: give a loaded student the teacher's tokenizer; its embeddings are copied where tokens "
        "are the same bytes, and averaged over its own tokens otherwise",
    )
    gradient_checkpointing: bool = Field(False, description="trade a third more compute for activation memory")
    adapter: AdapterConfig | None = Field(
        None, description="train an adapter and leave the student's own weights alone"
    )

    @model_validator(mode="after")
    def _shrink_needs_init(self) -> StudentConfig:
        if self.shrink != ShrinkConfig() and self.init != "shrink":
            raise ValueError(f"shrink is set and init is {self.init!r}: set student.init = 'shrink' to cut the student")
        return self

    @model_validator(mode="after")
    def _has_embeddings_to_keep(self) -> StudentConfig:
        if self.vocabulary == "own":
            return self
        if self.init == "shrink":
            raise ValueError(
                "vocabulary = 'teacher' changes the tokens of a student, and one that is cut from its teacher has the "
                "teacher's: leave vocabulary out"
            )
        if self.init == "random":
            raise ValueError(
                "vocabulary = 'teacher' keeps embeddings that were learned, and init = 'random' has none: leave "
                "vocabulary out, and give a configuration with the teacher's vocab_size"
            )
        if self.adapter is not None:
            raise ValueError(
                "vocabulary = 'teacher' changes the student's embeddings, and an adapter leaves them as they are: "
                "leave student.adapter out to train all weights, or leave vocabulary out"
            )
        return self

    @property
    def reads_as_teacher(self) -> bool:
        """Whether its text is read in the teacher's tokens, whatever tokenizer its folder has."""
        return self.init == "shrink" or self.vocabulary == "teacher"


class PhaseConfig(Section):
    name: str = Field(description="as log and report show it")
    until: Annotated[float, Field(gt=0, le=1)] = Field(description="progress at which the phase ends")


class CurriculumConfig(Section):
    phases: tuple[PhaseConfig, ...] = Field((), description="names for stretches of the run, for log and report")

    @model_validator(mode="after")
    def _in_order(self) -> CurriculumConfig:
        ends = [phase.until for phase in self.phases]
        if ends != sorted(ends):
            raise ValueError("phases must be listed in the order in which they end")
        return self


class PrecisionConfig(Section):
    mode: PrecisionMode = Field("auto", description="chosen from what the device can natively do")
    moments: Literal["float32", "bfloat16"] = Field(
        "float32", description="storage of AdamW's moments; bfloat16 is rounded stochastically and needs no bf16 unit"
    )
    initial_loss_scale: Annotated[float, Field(ge=1, le=MOST_FLOAT)] = Field(
        65536.0, description="the largest to begin with: one backward pass before the first step finds what fits"
    )
    loss_scale_growth_steps: Size = Field(2000, description="good steps before it doubles")
    min_loss_scale: Positive = Field(
        1.0, description="where batch after batch overflows at this scale, the run stops with exit code 23"
    )


class GuardConfig(Section):
    on_nonfinite: Literal["recover", "halt"] = Field(
        "recover", description="halt: stop at the first value that is not finite"
    )
    max_consecutive: Size = Field(20, description="refused steps in a row before the run stops")
    max_retries: Count = Field(
        3, description="smaller loss scales tried on one batch; at the smallest, batches in a row that may overflow"
    )
    max_skip_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.10, description="share of the last 200 attempts that may be refused before the run stops, exit code 21"
    )
    spike_z: Positive = Field(
        6.0, description="robust standard deviations above the median at which a loss or norm is examined"
    )
    skip_grad_norm: NonNegative = Field(
        0.0,
        description="0: off. Harmful: a step is skipped whose gradient norm before clipping is above this, whatever "
        "the run's norms are; spike_z follows them",
    )
    spike_window: Annotated[int, Field(ge=4, le=MOST)] = Field(
        50, description="accepted steps the median is taken over"
    )
    spike_warmup: Size = Field(
        10,
        description="accepted steps before there are statistics; until then a loss is examined at three times the "
        "largest so far",
    )
    max_rollbacks: Count = Field(5, description="returns to a good state before the run stops")
    on_exhausted: Literal["halt", "reset"] = Field(
        "halt", description="reset: begin again from the initial weights once when the rollbacks are spent"
    )
    snapshot_steps: Size = Field(
        50,
        description="applied steps between snapshots; before the first, the state is examined after 1, 2, 4, 8 ...",
    )
    snapshot_ring: Size = Field(2, description="snapshots kept in memory")
    learning_rate_backoff: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="factor on the learning rate when a stretch diverges twice, recovering over 50 steps"
    )
    fallback_after: Size = Field(
        20, description="steps in a row with the teacher at fault before a stretch of cross-entropy alone"
    )
    fallback_steps: Size = Field(50, description="length of that stretch")
    logit_clamp: NonNegative = Field(
        0.0, description="0: off. Harmful: puts a floor under the perplexity, which is printed"
    )
    loss_clamp: NonNegative = Field(0.0, description="0: off. Harmful: the gradient of a clamped loss is zero")


class EvalConfig(Section):
    max_batches: Count = Field(0, description="batches in an evaluation; 0: all held-out data")
    batch_size: Annotated[int, Field(ge=0, le=MOST_ROWS)] = Field(0, description="rows; 0: as in training")
    max_perplexity: NonNegative = Field(
        0.0, description="a check of the result: held-out perplexity below this; 0: below the untrained student's"
    )
    min_share: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.01, description="a check of the result: the least share of the objective for a term that has a weight"
    )
    samples: Count = Field(3, description="texts continued by teacher and student in the report")
    sample_tokens: Size = Field(48, description="tokens of each continuation")


class CheckpointConfig(Section):
    keep: Size = Field(2, description="checkpoints kept on disk")
    background: Literal["auto", "on", "off"] = Field(
        "auto",
        description="write checkpoints while training goes on, from a copy of weights and moments in main memory; "
        "auto: where that copy and the snapshots together take at most 0.4 of the free main memory",
    )


class TelemetryConfig(Section):
    first_steps: Count = Field(5, description="steps whose components are printed in full")
    log_steps: Size = Field(10, description="steps between plain log lines")
    gradient_steps: Count = Field(
        0, description="steps between measurements of each term's gradient; 0: never. Costs a backward pass a term"
    )
    tracker: Literal["none", "tensorboard", "trackio", "wandb"] = Field(
        "none", description="also hand figures to this tracker, where it is installed; one that fails stops no run"
    )


class Config(Section):
    """The configuration of a run."""

    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    student: StudentConfig = Field(default_factory=StudentConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    objectives: ObjectivesConfig = Field(default_factory=ObjectivesConfig)
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)

    _given: frozenset[str] = PrivateAttr(frozenset())

    @property
    def given(self) -> frozenset[str]:
        """Dotted keys that a person set, not a preset or a default. Empty for a configuration read from a run."""
        return self._given

    def with_given(self, keys: Iterable[str]) -> Config:
        """A copy that knows which of its settings were given."""
        copy = self.model_copy()
        copy._given = frozenset(keys)
        return copy

    def __eq__(self, other: object) -> bool:
        """Compare the settings alone: who gave them makes no difference to a run."""
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    @model_validator(mode="after")
    def _possible(self) -> Config:
        kd, ce = self.objectives.kd.weight, self.objectives.ce.weight
        if kd == 0.0 and ce == 0.0:
            raise ValueError("objectives.kd.weight and objectives.ce.weight are both 0: there is nothing to learn")
        inner = self.objectives.inner_weights
        if inner and self.teacher.cache:
            raise ValueError(
                f"{' and '.join(inner)} look inside the teacher, and teacher.cache holds only its answers: set "
                + " and ".join(f"objectives.{name}.weight = 0" for name in inner)
                + ", or leave teacher.cache out"
            )
        if inner and self.teacher.signal.kind not in ("auto", "dense"):
            raise ValueError(f"{' and '.join(inner)} look inside the teacher: set teacher.signal.kind = 'dense'")
        if self.student.vocabulary == "teacher" and self.objectives.span_weights:
            spans = list(self.objectives.span_weights)
            raise ValueError(
                f"{' and '.join(spans)} compare two tokenizers, and student.vocabulary = 'teacher' leaves one: set "
                + " and ".join(f"objectives.{name}.weight = 0" for name in spans)
                + " and objectives.kd.weight, or leave student.vocabulary out"
            )
        if self.teacher.server and (inner or self.student.init == "shrink"):
            what = f"{' and '.join(inner)} look inside the teacher" if inner else "student.init = 'shrink' cuts it"
            raise ValueError(f"{what}, and teacher.server gives only its answers: leave teacher.server out")
        if self.student.init == "shrink" and self.teacher.placement == "stream":
            raise ValueError(
                "student.init = 'shrink' cuts the student from the whole teacher: set teacher.placement = 'device' or "
                "'offload'"
            )
        if self.teacher.placement == "shard":
            self._refuse_uneven_questions()
        is_whole = self.train.max_warmup_share == 1.0  # else the warm-up is cut to that share
        if is_whole and self.train.max_steps and self.train.warmup_steps >= self.train.max_steps:
            raise ValueError(
                f"train.warmup_steps {self.train.warmup_steps} leaves nothing of train.max_steps {self.train.max_steps}"
            )
        return self

    def _refuse_uneven_questions(self) -> None:
        """All processes must ask a sharded teacher as often, or the others wait for the one that does not."""
        if self.data.label_sources:
            raise ValueError(
                "a source with objectives = 'labels' leaves some processes without a question to the teacher, and "
                "teacher.placement = 'shard' needs all of them: set teacher.placement = 'device'"
            )
        if self.telemetry.gradient_steps:
            raise ValueError(
                "telemetry.gradient_steps asks the teacher in some processes, and teacher.placement = 'shard' needs "
                "all of them: set telemetry.gradient_steps = 0"
            )

    def on_day(self, day: str) -> Config:
        """The same configuration with the day that chat templates print."""
        return self.model_copy(update={"data": self.data.model_copy(update={"day": day})})

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


# -- faults ----------------------------------------------------------------------------------------
# The faults of `--inject`, and their syntax: fault@step, or fault@stepxN for N attempts.


FAULTS = {
    "nan_weight": "one weight of the student becomes NaN",
    "nan_embedding": "one weight becomes NaN in the row of a token that is hardly ever used",
    "huge_weight": "eight weights of the student become 30,000",
    "inf_logit": "one hidden value of the student becomes infinite",
    "teacher_nan": "the teacher answers NaN",
    "teacher_garbage": "the teacher answers finite nonsense",
    "router_nan": "one weight of a trained gate becomes NaN",
    "oom": "memory runs out in the student's forward",
    "all_masked": "no token of the batch is scored",
    "bad_batch": "the batch is random tokens",
    "inf_grad": "one gradient becomes infinite",
    "nan_grad": "one gradient becomes NaN",
    "nan_moment": "one moment of the optimizer becomes NaN",
    "lr_spike": "the learning rate is a thousand times too high",
    "disk_full": "the next checkpoint cannot be written",
    "kill": "the process is killed before the step, when its last checkpoint is whole",
    "freeze": "the process is stopped before the step and does not go on, as one that hangs",
    "kill_mid_update": "the process is killed while weights are written",
    "kill_while_writing": "the process is killed while a checkpoint's tensors are written",
    "kill_before_rename": "the process is killed before a checkpoint is renamed into place",
    "kill_after_rename": "the process is killed after a checkpoint was renamed into place",
    "kill_after_mark": "the process is killed after a rollback was noted on the disk, before anything was saved",
    "kill_while_retiring": "the process is killed while checkpoints that a rollback abandoned are removed",
    "kill_in_eval": "the process is killed during an evaluation",
}

_WORD = re.compile(r"^(?P<name>[a-z_]+)@(?P<step>\d{1,9})(?:x(?P<times>[1-9]\d{0,8}))?$")


@dataclass
class Fault:
    name: str
    step: int
    left: int


def parse(spec: str) -> list[Fault]:
    """Parse a list of faults such as `"nan_weight@40,teacher_nan@60x5"`."""
    faults = []
    for word in filter(None, (part.strip() for part in spec.split(","))):
        parts = _WORD.match(word)
        if not parts:
            raise ConfigError(f"--inject {word}: expected fault@step or fault@stepxN", advice=["nan_weight@40"])
        name = parts["name"]
        if name not in FAULTS:
            near = difflib.get_close_matches(name, FAULTS, n=1)
            raise ConfigError(
                f"--inject {word}: there is no fault {name!r}",
                advice=[f"did you mean {match}?" for match in near] + [f"faults: {', '.join(FAULTS)}"],
            )
        faults.append(Fault(name, int(parts["step"]), int(parts["times"] or 1)))
    return faults
