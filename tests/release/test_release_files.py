"""What a release needs beside the code: one version, a citation, a policy, templates and images that can be built."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import stillroom

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, continued lines joined and comments left out."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined.splitlines() if line.strip()]


def test_there_is_one_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PROJECT["version"] == stillroom.__version__ == citation["version"] == version("stillroom")


def test_the_citation_has_what_its_format_asks_for() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == PROJECT["license"]
    assert citation["abstract"] == PROJECT["description"]


@pytest.mark.parametrize("name", ["LICENSE", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "constraints.txt"])
def test_a_file_that_readers_look_for_is_there(name: str) -> None:
    assert (ROOT / name).stat().st_size > 100


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_an_issue_template_is_a_form(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form["blank_issues_enabled"] is True
        return
    assert form["name"] and form["description"]
    names = [item["id"] for item in form["body"]]
    assert len(names) == len(set(names))
    assert all(item["attributes"]["label"] for item in form["body"])
    assert {item["type"] for item in form["body"]} <= {"input", "textarea", "dropdown", "checkboxes", "markdown"}


def test_what_the_images_copy_exists_and_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    for name, words in instructions():
        if name == "COPY" and "--from" not in words:
            for source in words.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, f"{source} does not reach the build"


def test_what_the_build_of_the_package_reads_is_copied() -> None:
    copied = " ".join(words for name, words in instructions() if name == "COPY")
    for source in ("pyproject.toml", "src", PROJECT["readme"], *PROJECT["license-files"]):
        assert source in copied.split(), source


def test_both_images_are_named_and_run_the_command_as_a_plain_user() -> None:
    stages: dict[str, list[tuple[str, str]]] = {}
    parents: dict[str, str] = {}
    for name, words in instructions():
        if name == "FROM":
            parent, _as, stage = words.split()
            parents[stage], stages[stage] = parent, []
        else:
            stages[stage].append((name, words))
    for image in ("cpu", "cuda"):
        assert ("ENTRYPOINT", '["stillroom"]') in stages[image]
        assert ("USER", "1000") in stages[image]
        assert f"--target {image}" in DOCKERFILE
        while parents[image] in stages:
            image = parents[image]
        assert ":" in parents[image], "an image without a version changes from day to day"


def test_images_install_the_tried_versions() -> None:
    for name, words in instructions():
        for command in words.split("&&") if name == "RUN" else []:
            if command.strip().startswith("pip install"):
                assert "constraints.txt" in command, command
