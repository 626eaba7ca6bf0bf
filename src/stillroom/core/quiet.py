"""Keep to themselves what torchao logs while it is imported: of GPUs and versions that nobody here asked about.

transformers imports torchao where it is installed, so these lines would be the first that a user of ours sees, in a
notebook in red. What it logs later, errors, and what others log, passes.
"""

from __future__ import annotations

import logging
import sys

_LOGGERS = ("torchao", "torch.utils._pytree")


def _passes(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or not any(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "torchao"
    )


def quiet_imports() -> None:
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_passes)
