"""Try the regular expressions of an adapter's configuration before peft matches names with them.

They come with the adapter, and one that backtracks without end would hang the process: Python cannot interrupt a match.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from stillroom.errors import BrokenAtStart

_SECONDS = 5.0  # ordinary patterns take milliseconds for ten thousand names
_PLAIN = re.compile(r"[\w.\-]*")
# In the forms in which peft uses a pattern. One that does not compile is left for peft to report.
_TRIAL = r"""
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    start, end = rf"(?:^|.*?\.){pattern}", rf"{pattern}($|\..*)"
    for form in (pattern, rf"(.*\.)?({pattern})$", rf"(^|.*\.){end}", rf"{start}\.(?P<i>\d+)\."):
        for name in names:
            re.match(form, name), re.fullmatch(form, name)
"""


def check_patterns(config: Mapping[str, Any], names: Sequence[str], adapter: str) -> None:
    """Raise if a pattern does not come to an end on the names of a network's parts."""
    patterns = [pattern for pattern in _patterns(config) if not _PLAIN.fullmatch(pattern)]
    if not patterns:
        return
    trial = json.dumps([patterns, list(names)]).encode()
    command = [sys.executable, "-I", "-c", _TRIAL]
    try:
        subprocess.run(command, input=trial, timeout=_SECONDS, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        raise BrokenAtStart(
            f"adapter_config.json of {adapter} has a pattern that does not come to an end on the names of its base",
            where="target_modules, exclude_modules, rank_pattern ...",
            advice=["list the names of the layers in target_modules", "get the adapter from a place you trust"],
        ) from None


def _patterns(config: Mapping[str, Any]) -> list[str]:
    """Every string of a configuration that peft may use as a pattern."""
    keys = ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "target_parameters")
    found: list[Any] = []
    for key in (*keys, "rank_pattern", "alpha_pattern"):
        value = config.get(key)
        found += value if isinstance(value, list | dict) else [value]  # of a table, its keys
    return [pattern for pattern in found if isinstance(pattern, str)]
