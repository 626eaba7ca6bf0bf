"""Stillroom distils a large language model into a small one and does not fall over.

import stillroom
result = stillroom.distill(stillroom.load_config("run.toml"), out="runs/mine")
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stillroom.config import Config, load_config
from stillroom.errors import NoBetterStudent, StillroomError

if TYPE_CHECKING:
    from stillroom.engine.distill import Result

__version__ = "0.1.0"
__all__ = ["Config", "StillroomError", "distill", "load_config"]


def distill(config: Config, out: str | Path | None = None, **options: Any) -> Result:
    """Distil as configured and write the report. Without `out`, a new folder below `runs` is made.

    Options: `device`, `inject`, `listeners`.
    """
    # Torch is loaded here and not at import: reading a configuration must stay quick.
    from stillroom.engine.distill import distill as run
    from stillroom.report import write_report

    folder = out or Path("runs") / f"run-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        result = run(config, folder, **options)
    except NoBetterStudent as error:  # the run is complete and its report worth reading
        write_report(Path(str(error.folder)))
        raise
    write_report(result.folder)
    return result
