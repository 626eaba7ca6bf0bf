"""The section of a student that is trained by an adapter."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from stillroom.config.sections import Positive, Section, Size


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
