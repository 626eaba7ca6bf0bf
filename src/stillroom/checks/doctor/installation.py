"""The installation: versions against what the package asks for, faults that are known and can be seen, extras."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from importlib import metadata

import torch
import torch.nn.functional as F

from stillroom.checks.doctor.finding import Finding, check
from stillroom.checks.doctor.setup import Setup
from stillroom.errors import StillroomError
from stillroom.models import find

SUBJECT = "installation"
_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)\s*$")
_SHOWN = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


@check(SUBJECT, needs_config=False)
def versions(_setup: Setup) -> Iterator[Finding]:
    for name, least in requirements():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding("red", SUBJECT, f"{name} is not installed", f"pip install '{name}>={least}'")
            continue
        if numbers(found) < numbers(least):
            what = f"{name} {found} is installed, and {least} or later is needed"
            yield Finding("red", SUBJECT, what, f"pip install -U '{name}>={least}'")
    said = ", ".join(f"{name} {metadata.version(name)}" for name in _SHOWN if importlib.util.find_spec(name))
    yield Finding("green", SUBJECT, said)


def requirements() -> list[tuple[str, str]]:
    """The packages that ours asks for, each with its least version."""
    try:
        lines = metadata.requires("stillroom") or []
    except metadata.PackageNotFoundError:  # run from its source, not installed
        return []
    found = (_REQUIREMENT.match(line) for line in lines if ";" not in line)  # after it stands the name of an extra
    return [(match[1], match[2]) for match in found if match]


def numbers(version: str) -> tuple[int, ...]:
    """A version as numbers: 2.13.0+cpu -> (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


@check(SUBJECT, needs_config=False)
def attention(_setup: Setup) -> Iterator[Finding]:
    """Builds that answer zeros where a query is NaN (pytorch/pytorch 141128): a broken student's loss looks sound."""
    query = torch.full((1, 1, 4, 8), float("nan"))
    rest = torch.ones(1, 1, 4, 8)
    if not bool(F.scaled_dot_product_attention(query, rest, rest, is_causal=True).isnan().any()):
        what = f"attention of torch {torch.__version__} answers NaN with zeros on this CPU: the guard looks at weights"
        yield Finding("green", SUBJECT, what)


@check(SUBJECT)
def extras(setup: Setup) -> Iterator[Finding]:
    for role, section in (("teacher", setup.config.teacher), ("student", setup.config.student)):
        try:
            source = find(section.model)
        except StillroomError:
            continue  # told of with the models
        if source.is_adapter and importlib.util.find_spec("peft") is None:
            what = f"the {role} {source.name} is a LoRA adapter, and peft is not installed"
            yield Finding("red", SUBJECT, what, "pip install 'stillroom[peft]'")
        if source.is_gguf and importlib.util.find_spec("gguf") is None:
            what = f"the {role} {source.name} is a GGUF file, and gguf is not installed"
            yield Finding("red", SUBJECT, what, "pip install 'stillroom[gguf]'")
