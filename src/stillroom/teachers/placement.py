"""Where the weights of a live teacher are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Placement:
    """On the device for good. A subclass overrides what differs."""

    leaves = False  # whether the weights go away after `at_work`, the head's too
    writes_text = True  # whether it answers fast enough to write a text token by token

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The network can be run on the device in the body."""
        yield

    def facts(self) -> dict[str, Any]:
        """Entries for the run's summary."""
        return {}
