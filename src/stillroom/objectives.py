"""The public address of the objectives: what `stillroom.losses` exports, for programs and for packages that add one."""

from stillroom.losses import *  # noqa: F403
from stillroom.losses import __all__ as __all__
from stillroom.losses import divergences as divergences
