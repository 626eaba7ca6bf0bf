"""Import a package that only some sources need."""

from __future__ import annotations

import importlib
from typing import Any

from stillroom.errors import DataError


def needed(module: str, where: str) -> Any:
    """The module. Raise `DataError` with the package to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise DataError(
            f"{package} is not installed", where=where, advice=[f"pip install {package}", "convert the data to .jsonl"]
        ) from error
