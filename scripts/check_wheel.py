"""Check that a wheel or source archive holds every file of the package, and nothing of the repository beside it.

python scripts/check_wheel.py dist/*
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MADE = {".pyc", ".pyo", ".so"}


def package_files(source: Path) -> set[str]:
    """Files of the package below `source`, from `stillroom/` on."""
    return {
        path.relative_to(source).as_posix()
        for path in (source / "stillroom").rglob("*")
        if path.is_file() and path.suffix not in MADE and "__pycache__" not in path.parts
    }


def wheel_files(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def archive_files(path: Path) -> set[str]:
    """Files of a source archive without its top folder."""
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def complaints(path: Path, source: Path) -> list[str]:
    """What is missing in a wheel or archive, and what does not belong there."""
    wanted = package_files(source)
    if path.suffix == ".whl":
        held = wheel_files(path)
        strange = {name for name in held if not name.startswith("stillroom") or name not in wanted}
        strange = {name for name in strange if ".dist-info/" not in name}
    else:
        wanted = {f"src/{name}" for name in wanted}
        held = archive_files(path)
        strange = {name for name in held if name.startswith("src/")} - wanted
    lacking = [f"{path.name} lacks {name}" for name in sorted(wanted - held)]
    return lacking + [f"{path.name} holds {name}, which is not in the source" for name in sorted(strange)]


def main() -> int:
    paths = [Path(word) for word in sys.argv[1:]]
    if not paths:
        print("name the files to check: python scripts/check_wheel.py dist/*")
        return 2
    found = [line for path in paths for line in complaints(path, ROOT / "src")]
    for line in found:
        print(line)
    for path in paths:
        print(f"{path.name}: {path.stat().st_size:,} bytes, {len(package_files(ROOT / 'src'))} files of the package")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
