"""How a run trains: steps, batches, rates and when it is evaluated and saved."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from stillroom.config.sections import MOST_MINUTES, Count, NonNegative, Positive, Rows, Section

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
