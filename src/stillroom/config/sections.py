"""Base classes of config sections: strict frozen records, and numbers that may change during a run."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

LEAST_TEMPERATURE = 0.01  # colder, a softmax is an argmax


MOST = 10**9  # of anything that is counted: rows, steps, tokens. Larger numbers are mistakes and overflow 64 bits
MOST_ROWS = 2**20  # in a batch, and micro-batches in a step
MOST_FLOAT = 1e12  # of weights, rates and temperatures: the product of three is finite in FP32
MOST_MINUTES = 10.0**7  # about 19 years; C libraries refuse much longer waits

Count = Annotated[int, Field(ge=0, le=MOST)]
Size = Annotated[int, Field(ge=1, le=MOST)]
Rows = Annotated[int, Field(ge=1, le=MOST_ROWS)]
Positive = Annotated[float, Field(gt=0, le=MOST_FLOAT)]
NonNegative = Annotated[float, Field(ge=0, le=MOST_FLOAT)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would convert: true for 1, "10" for 10, "false" or 0 for false.

        `--set` reads the word none as no value; where "none" is one of a setting's words, that word is meant.
        """
        annotation: Any = cls.model_fields[info.field_name or ""].annotation
        if value is None and get_origin(annotation) is Literal and "none" in get_args(annotation):
            return "none"
        kinds = _kinds(annotation)
        takes_numbers = bool(kinds & {int, float})
        if isinstance(value, bool):
            is_wrong = takes_numbers and bool not in kinds
        elif isinstance(value, str):
            is_wrong = (takes_numbers or bool in kinds) and str not in kinds
        else:
            is_wrong = isinstance(value, int | float) and bool in kinds and not takes_numbers
        if is_wrong:
            raise ValueError(f"expected {'a number' if takes_numbers else 'true or false'}")
        return value


@lru_cache(maxsize=512)
def _kinds(annotation: Any) -> frozenset[Any]:
    """The plain types that an annotation allows; the type of a literal's values counts."""
    if get_origin(annotation) is Literal:
        return frozenset(type(value) for value in get_args(annotation))
    if get_origin(annotation) in (tuple, dict):
        return frozenset()
    parts = get_args(annotation)
    return frozenset().union(*map(_kinds, parts)) if parts else frozenset({annotation})


class Ramp(Section):
    """A value that changes from `start` to `end` while progress goes from `begin` to `until`."""

    start: float = Field(description="value before and at `begin`")
    end: float = Field(description="value at and after `until`")
    begin: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="progress at which the change begins")
    until: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="progress at which it ends")
    shape: Literal["linear", "cosine", "step"] = Field(
        "linear", description="step: `start` until `until` is reached, then `end`"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Ramp:
        if self.begin > self.until:
            raise ValueError(f"begin {self.begin} lies after until {self.until}")
        return self


Scalar = float | Ramp


def ends(value: Scalar) -> tuple[float, ...]:
    """The start and end of a ramp; the one value of a constant."""
    return (value.start, value.end) if isinstance(value, Ramp) else (float(value),)


def between(least: float, most: float = math.inf) -> AfterValidator:
    """Validate that a scalar is finite and in [least, most] throughout the run."""

    def check(value: Scalar) -> Scalar:
        for end in ends(value):
            if not (least <= end <= most and math.isfinite(end)):
                bounds = f"at least {least:g}" if most >= MOST and end < least else f"between {least:g} and {most:g}"
                raise ValueError(f"must be {bounds}" + (f", and reaches {end:g}" if isinstance(value, Ramp) else ""))
        return value

    return AfterValidator(check)


Weight = Annotated[Scalar, between(0.0, MOST_FLOAT)]
Share = Annotated[Scalar, between(0.0, 1.0)]
Temperature = Annotated[Scalar, between(LEAST_TEMPERATURE, MOST_FLOAT)]


class ObjectiveSection(Section):
    """Base of an objective's section. A field of type `Scalar` may change during a run."""

    needs_teacher: ClassVar[bool] = True  # False: scored without the teacher's answer
    looks_inside: ClassVar[bool] = True  # False: stored answers of a teacher suffice
    compares_spans: ClassVar[bool] = False  # True: each model reads the text in its own tokens

    weight: Weight = Field(0.0, description="weight of the term; 0: not computed at all")

    @property
    def used_weight(self) -> Scalar:
        """The weight, or 0 where other settings switch the objective off."""
        return self.weight

    @property
    def settings(self) -> dict[str, Scalar]:
        """The scalars other than the weight, by field name."""
        return {
            name: getattr(self, name)
            for name, info in type(self).model_fields.items()
            if name != "weight" and Ramp in get_args(info.annotation)
        }


# -- train -----------------------------------------------------------------------------------------
# How a run trains: steps, batches, rates and when it is evaluated and saved.


Strategy = Literal["auto", "ddp", "fsdp"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


class TrainConfig(Section):
    max_steps: Count = Field(0, description="optimizer steps; 0: as many as `epochs` give")
    epochs: Annotated[float, Field(gt=0, le=10**6)] = Field(1.0, description="passes over the training data")
    batch_size: Rows | Literal["auto"] = Field(
        8,
        description="rows in a micro-batch; auto: `step_rows` in the largest micro-batches that fit, "
        "as `stillroom plan` counts",
    )
    step_rows: Rows = Field(32, description="rows in a step where batch_size is auto")
    gradient_accumulation_steps: Rows = Field(1, description="micro-batches in a step")
    learning_rate: Positive = Field(1e-3, description="peak learning rate of the student")
    router_learning_rate: NonNegative = Field(0.0, description="0: the student's")
    projector_learning_rate: NonNegative = Field(
        0.0, description="peak rate of the matrices that inner objectives train beside the student; 0: the student's"
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="how the learning rate falls after the warm-up; cosine ends low, slowly"
    )
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.1, description="end of the schedule")
    warmup_steps: Count = Field(0, description="optimizer steps; overrides warmup_ratio")
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="share of the optimizer steps")
    max_warmup_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the optimizer steps that the warm-up takes at most, whatever warmup_steps says"
    )
    weight_decay: NonNegative = Field(
        0.01, description="of AdamW, on matrices alone; more where the data is seen often"
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="of AdamW: memory of the gradient")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.95, description="of AdamW: memory of its square; shorter than 0.999, so that one spike is soon forgotten"
    )
    epsilon: Positive = Field(1e-8, description="of AdamW; always used in FP32")
    max_grad_norm: Positive = Field(
        1.0,
        description="the student's gradient as a whole is clipped to this norm; projectors and trained gates, which "
        "have rates of their own, are clipped to the same norm by themselves",
    )
    eval_steps: Count = Field(
        0, description="0: up to ten evaluations over the run, fewer where they would take more than a tenth of it"
    )
    save_steps: Count = Field(
        0, description="0: with eval_steps, else up to ten checkpoints that take at most a twentieth of the time"
    )
    compile: Literal["auto", "off", "student", "both"] = Field(
        "auto",
        description="torch.compile for the student, or for both models; auto: the student, in a run on a CPU that is "
        "long enough to be worth it",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="of random weights, order and rounding")
    early_stopping: Count = Field(0, description="stop after this many evaluations without a better student; 0: never")
    max_minutes: Annotated[float, Field(ge=0, le=MOST_MINUTES)] = Field(
        0.0, description="save and stop with exit code 75, loading and saving included; 0: no limit"
    )
    strategy: Strategy = Field(
        "auto",
        description="with several processes: ddp, each has the whole student; fsdp, each has a part of its weights and "
        "optimizer state; auto: ddp",
    )
    shard_size: Count = Field(
        0,
        description="with fsdp: processes that hold the parts of one copy of the student; the number of processes must "
        "be a multiple of it, and each further group has a copy of its own. 0: all processes hold one copy",
    )
    peer_timeout_minutes: Annotated[float, Field(gt=0, le=MOST_MINUTES)] = Field(
        30.0, description="with several processes: how long one waits for another before the run ends with exit code 75"
    )

    @property
    def rows_per_batch(self) -> int:
        """Rows in a batch of the loader; where memory is short it is taken in parts."""
        return self.step_rows if self.batch_size == "auto" else self.batch_size

    @model_validator(mode="after")
    def _shards_something(self) -> TrainConfig:
        if self.shard_size and self.strategy != "fsdp":
            raise ValueError(f"shard_size divides a sharded student: set strategy = 'fsdp', it is {self.strategy!r}")
        if self.shard_size == 1:
            raise ValueError("shard_size = 1 gives every process a whole student: set strategy = 'ddp'")
        return self

    @model_validator(mode="after")
    def _auto_decides_accumulation(self) -> TrainConfig:
        if self.batch_size == "auto" and self.gradient_accumulation_steps != 1:
            raise ValueError(
                "batch_size = auto decides how many micro-batches a step has: leave "
                "gradient_accumulation_steps out and set step_rows"
            )
        return self


# -- adapter ---------------------------------------------------------------------------------------
# The section of a student that is trained by an adapter.


class AdapterConfig(Section):
    """Train low-rank matrices beside the student's linear layers; its own weights stay as they are."""

    kind: Literal["lora", "dora"] = Field(
        "lora", description="dora: the length of each row of a weight is trained beside its direction"
    )
    rank: Size = Field(16, description="rank of the change to each layer's weight")
    alpha: Positive | None = Field(None, description="the change is multiplied by alpha / rank; none: twice the rank")
    targets: tuple[str, ...] = Field(
        (),
        description="linear layers by the last parts of their names, or with *: q_proj, mlp.down_proj, *.0.*; empty: "
        "all linear layers of the decoder's blocks",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="of the adapter's input, in training")
    base_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8"] = Field(
        "auto",
        description="storage of the frozen weights; auto: what the precision multiplies in. int8: linear layers as "
        "codes with a scale for each output, under fp32, bf16-mixed and fp16-mixed",
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        """Names may be given as one text with commas; all-linear is the word other programs use for all."""
        names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
        return () if names == ["all-linear"] else names

    @model_validator(mode="after")
    def _numbers_are_there(self) -> AdapterConfig:
        if self.kind == "dora" and self.base_dtype == "int8":
            raise ValueError(
                "kind = 'dora' trains the lengths of the base's rows and needs its numbers: set base_dtype = "
                "'float16', or kind = 'lora' for a base in int8"
            )
        return self

    @property
    def scaled_alpha(self) -> float:
        return self.alpha if self.alpha is not None else 2.0 * self.rank
