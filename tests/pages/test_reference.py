"""The reference pages are what the schema, the command line and the catalogue of events say today."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import stillroom
from stillroom.config import Config

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
reference: Any = importlib.import_module("reference")


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_is_current(name: str) -> None:
    assert reference.read(name) == reference.PAGES[name](), "python scripts/reference.py"


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_every_key_of_a_whole_configuration_is_on_the_page() -> None:
    whole = Config.model_validate({"student": {"adapter": {}}, "rollouts": {}}).to_dict()
    page = reference.read("configuration.md")
    ramps = {"objectives.kd.interpolation", "rollouts.share"}
    for key in leaves(whole):
        shown = next((ramp for ramp in ramps if key.startswith(f"{ramp}.")), key)
        assert f"| `{shown}` |" in page, key


def every_section() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in Config.model_fields.items():
        yield from reference.sections(reference.section_of(field.annotation), name)
    yield from (("ramp", reference.Ramp), ("source", reference.SourceConfig), ("phase", reference.PhaseConfig))


def test_every_key_says_what_it_does() -> None:
    silent = [
        f"{name}.{key}"
        for name, kind in every_section()
        for key, field in kind.model_fields.items()
        if not field.description and not reference.section_of(field.annotation)
    ]
    assert silent == []


def test_every_option_says_what_it_means() -> None:
    rows = [line for line in reference.read("commands.md").splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if row.rstrip("| ").count("|") < 3] == []


def test_the_api_page_documents_every_public_name_by_that_name() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    objects = {name: getattr(stillroom, name) for name in stillroom.__all__}
    objects["training"] = stillroom.api.training  # the package of that name stands for it
    documented = {
        name
        for name, one in objects.items()
        if f"::: stillroom.{name}\n" in page
        or (one.__qualname__ == name and f"::: {one.__module__}.{name}\n" in page)
        or f"- {one.__qualname__}\n" in page
    }
    assert set(objects) - documented == {"Config"}, "settings have their own page"
