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
