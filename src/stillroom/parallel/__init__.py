"""One process or several: the seam through which a run uses them."""

from stillroom.parallel.base import Parallel, fingerprint
from stillroom.parallel.replicated import Replicated, join

__all__ = ["Parallel", "Replicated", "fingerprint", "join"]
