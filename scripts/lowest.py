"""Print the lowest versions that pyproject.toml declares, as a constraints file for pip.

python scripts/lowest.py [EXTRA ...] > lowest.txt
pip install -c lowest.txt '.[EXTRA,...]'
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<extras>[\w,-]+)\])?(?P<bound>[=>]=(?P<version>[\w.]+))?")


def lowest(requirements: Iterable[str], extras: dict[str, list[str]], own_name: str) -> Iterator[tuple[str, str]]:
    """(package, lowest version) of each requirement. Those of the project's own extras are looked up in `extras`."""
    for requirement in (one.partition(";")[0].strip() for one in requirements):
        parts = _REQUIREMENT.fullmatch(requirement)
        if parts is None:
            raise ValueError(f"{requirement!r} is not of the form name>=version")
        if parts["name"] == own_name:
            for extra in (parts["extras"] or "").split(","):
                yield from lowest(extras[extra], extras, own_name)
        elif parts["bound"] is None:
            raise ValueError(f"{requirement!r} declares no lowest version")
        else:
            yield parts["name"], parts["version"]


def lines(project: dict[str, object], wanted: Iterable[str]) -> list[str]:
    """The constraints of a `[project]` table with these extras."""
    extras: dict[str, list[str]] = project.get("optional-dependencies", {})  # type: ignore[assignment]
    named = [*project["dependencies"], *(line for extra in wanted for line in extras[extra])]  # type: ignore[misc]
    found = set(lowest(named, extras, str(project["name"])))
    if len(dict(found)) < len(found):
        raise ValueError(f"a package has two lowest versions: {sorted(found)}")
    return [f"{name}=={version}" for name, version in sorted(found)]


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print("\n".join(lines(project, sys.argv[1:])))


if __name__ == "__main__":
    main()
