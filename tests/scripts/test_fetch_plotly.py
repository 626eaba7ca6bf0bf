"""The charting library that reports carry is the one its origin names."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files


def test_the_vendored_library_is_the_one_its_origin_names() -> None:
    assets = files("stillroom.report") / "assets"
    origin = json.loads((assets / "origin.json").read_text(encoding="utf-8"))
    script = (assets / origin["file"]).read_bytes()
    assert hashlib.sha256(script).hexdigest() == origin["sha256"]
    assert len(script) == origin["bytes"]
    assert f"v{origin['version']}" in script[:200].decode()
    assert origin["licence"] == "MIT"
    assert (assets / "LICENSE.plotly").read_text(encoding="utf-8").startswith("MIT License")


def test_the_library_cannot_end_the_element_it_is_in() -> None:
    assert b"</script" not in (files("stillroom.report") / "assets" / "plotly-basic.min.js").read_bytes().lower()
