"""Detect a notebook, and show text in it that can be updated.

A notebook's output is not a terminal: it does not obey escape codes. Changing text needs an updatable display. IPython
is used only if it is already running; it is not a dependency.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def is_notebook() -> bool:
    """Whether this process is a Jupyter kernel. False for IPython in a terminal."""
    ipython = sys.modules.get("IPython")
    if ipython is None or "ipykernel" not in sys.modules:
        return False
    shell = ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class UpdatedText:
    """One text in a notebook's output, replaced by each `show`."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        picture = {"text/plain": text}
        if self._handle is None:
            display = importlib.import_module("IPython.display").display
            self._handle = display(picture, raw=True, display_id=True)
        else:
            self._handle.update(picture, raw=True)
