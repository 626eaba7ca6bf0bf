"""The base of schemas for files that a run reads back: each format states its types once, and a wrong one is an error.

A checksum says that a file is what was written, not that its values can be used.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

LARGEST = 2**53  # what every reader of JSON takes for the same whole number
Count = Annotated[int, Field(ge=0, le=LARGEST)]


class Stored(BaseModel):
    """Values of a file. No value is converted, none is infinite or NaN; keys that are not named here are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def of(cls, value: object) -> Self:
        """Read JSON values. Raise ValueError in one line, with the key that is wrong."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(str(part) for part in first["loc"]) or "the value"
            raise ValueError(f"{key}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
