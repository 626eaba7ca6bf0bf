"""Where the weights of a live teacher are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stillroom.types import HeadWeights


class Placement:
    """On the device for good. A subclass overrides what differs."""

    is_shared = False  # whether all processes have to ask it at the same time
    writes_text = True  # whether it answers fast enough to write a text token by token

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The network can be run on the device in the body."""
        yield

    def lasting(self, head: HeadWeights) -> HeadWeights:
        """The head as the objectives may use it after `at_work`."""
        return head

    def begin_window(self) -> None:
        """A window of micro-batches begins."""

    def end_window(self) -> None:
        """Its backward passes are done: nothing of its answers is needed any more."""

    def facts(self) -> dict[str, Any]:
        """Entries for the run's summary."""
        return {}
