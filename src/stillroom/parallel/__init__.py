"""Train in one process or in several behind one interface. `join` makes it."""

from stillroom.parallel.base import Parallel, fingerprint, join
from stillroom.parallel.ddp import Replicated

__all__ = ["Parallel", "Replicated", "fingerprint", "join"]
