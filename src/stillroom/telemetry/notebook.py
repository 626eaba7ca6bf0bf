"""Whether this process serves a notebook, and a place in its output that can be written over.

A notebook's output is no terminal: escape codes show as they are, and lines only grow. What changes is shown by a
display that is updated. IPython is asked only where it runs already; it is no dependency.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def is_notebook() -> bool:
    """Whether the output of this process is that of a Jupyter kernel. IPython in a terminal is a terminal."""
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
