"""One interface for runs of one process and of several."""

from stillroom.parallel.base import Parallel, fingerprint
from stillroom.parallel.ddp import Replicated
from stillroom.parallel.start import join

__all__ = ["Parallel", "Replicated", "fingerprint", "join"]
