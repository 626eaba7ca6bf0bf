"""Fetch the charting library that reports carry, and write it with its origin and licence into the package.

    python scripts/fetch_plotly.py            # the version in origin.json
    python scripts/fetch_plotly.py 4.1.1

`plotly.js-basic-dist-min` is plotly.js's own build with lines, bars and pies only, a quarter of the whole library. The
archive is checked against the sha512 that the registry gives for it; the file is kept byte for byte.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
import tarfile
import urllib.request
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "src" / "stillroom" / "report" / "assets"
PACKAGE = "plotly.js-basic-dist-min"
SCRIPT = "plotly-basic.min.js"
REGISTRY = "https://registry.npmjs.org"


def fetch(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:
        contents: bytes = answer.read()
    return contents


def main() -> None:
    origin = ASSETS / "origin.json"
    version = sys.argv[1] if len(sys.argv) > 1 else json.loads(origin.read_text())["version"]
    about = json.loads(fetch(f"{REGISTRY}/{PACKAGE}/{version}"))
    archive = fetch(about["dist"]["tarball"])
    kind, _, wanted = about["dist"]["integrity"].partition("-")
    if base64.b64encode(hashlib.new(kind, archive).digest()).decode() != wanted:
        sys.exit(f"{about['dist']['tarball']} is not what the registry describes")
    if about["license"] != "MIT":
        sys.exit(f"version {version} has the licence {about['license']}: look at it before it is shipped")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        members = {Path(member.name).name: files.extractfile(member) for member in files if member.isfile()}
        script, licence = (member.read() for name in (SCRIPT, "LICENSE") if (member := members[name]))
    (ASSETS / SCRIPT).write_bytes(script)
    (ASSETS / "LICENSE.plotly").write_bytes(licence)
    description = {
        "package": PACKAGE,
        "version": version,
        "tarball": about["dist"]["tarball"],
        "integrity": about["dist"]["integrity"],
        "licence": about["license"],
        "file": SCRIPT,
        "bytes": len(script),
        "sha256": hashlib.sha256(script).hexdigest(),
    }
    origin.write_text(json.dumps(description, indent=1) + "\n")
    print(f"{PACKAGE} {version}: {len(script):,} bytes")


if __name__ == "__main__":
    main()
