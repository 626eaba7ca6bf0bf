"""Compare or change the address of the repository, which `[project.urls]` of pyproject.toml holds.

python scripts/address.py --check    # exit code 1, and a line for each text with another address
python scripts/address.py URL        # write URL into every text that has the present address
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A code host's address of a repository with our name, under any owner.
ADDRESS = re.compile(
    r"https?://(?:github|gitlab)\.com/[\w.-]+/stillroom(?![\w-])|https?://codeberg\.org/[\w.-]+/stillroom(?![\w-])"
)


def address() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["urls"]["Repository"])


def texts() -> Iterator[Path]:
    """Files of the repository that may hold the address: not the result files, and not the tests."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    )
    for name in listed.stdout.decode().splitlines():
        path = ROOT / name
        is_text = path.suffix in (".md", ".toml", ".yml", ".cff", ".py", ".ipynb") and "results" not in path.parts
        if is_text and path.is_file() and not path.is_symlink() and not name.startswith(("tests/", "site/")):
            yield path


def others() -> list[str]:
    """`file: address` of each text whose address is not that of pyproject.toml."""
    own = address()
    return [
        f"{path.relative_to(ROOT).as_posix()}: {found}"
        for path in texts()
        for found in ADDRESS.findall(path.read_text(encoding="utf-8"))
        if found != own
    ]


def change(new: str) -> list[str]:
    """Write another address; returns the files that were changed."""
    own, changed = address(), []
    for path in texts():
        text = path.read_text(encoding="utf-8")
        if own in text:
            path.write_text(re.sub(re.escape(own) + r"(?![\w-])", new, text), encoding="utf-8")
            changed.append(path.relative_to(ROOT).as_posix())
    return changed


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        wrong = others()
        print("\n".join([*wrong, f"{address()}: {len(wrong)} texts have another address"]))
        return 1 if wrong else 0
    if len(arguments) != 1 or not re.fullmatch(r"https://[\w.-]+(?:/[\w.-]+)+", arguments[0]):
        print(__doc__)
        return 2
    print("\n".join(change(arguments[0])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
