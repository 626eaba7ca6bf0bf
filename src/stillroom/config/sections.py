"""What every section of the configuration is made of: strict frozen records, and numbers that may move."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Ramp(Section):
    """A value that moves from `start` to `end` while progress goes from `begin` to `until`."""

    start: float = Field(description="value before and at `begin`")
    end: float = Field(description="value at and after `until`")
    begin: Annotated[float, Field(ge=0, le=1)] = 0.0
    until: Annotated[float, Field(ge=0, le=1)] = 1.0
    shape: Literal["linear", "cosine", "step"] = Field(
        "linear", description="step: `start` until `until` is reached, then `end`"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Ramp:
        if self.begin > self.until:
            raise ValueError(f"begin {self.begin} lies after until {self.until}")
        return self


Scalar = float | Ramp
