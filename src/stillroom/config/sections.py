"""Base classes of config sections: strict frozen records, and numbers that may change during a run."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

LEAST_TEMPERATURE = 0.01  # colder, a softmax is an argmax


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


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
                bounds = f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
                raise ValueError(f"must be {bounds}" + (f", and reaches {end:g}" if isinstance(value, Ramp) else ""))
        return value

    return AfterValidator(check)


Weight = Annotated[Scalar, between(0.0)]
Share = Annotated[Scalar, between(0.0, 1.0)]
Temperature = Annotated[Scalar, between(LEAST_TEMPERATURE)]


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
