"""Errors by what they are about, not by their wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stillroom.core.errors import StillroomError


@contextmanager
def refused(
    error: type[StillroomError], where: str = "", *names: str
) -> Iterator[pytest.ExceptionInfo[StillroomError]]:
    """The block ends with this error. Its place holds `where`; its text and advice hold `names`: keys and values."""
    with pytest.raises(error) as caught:
        yield caught
    assert where in caught.value.where, f"{caught.value.where!r} is not about {where!r}"
    told = " ".join((str(caught.value.what), *caught.value.advice))
    missing = [name for name in names if name not in told]
    assert not missing, f"{missing} not named in: {told}"
