"""What a release needs: one version and address, a citation, a policy, templates and images that can be built."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

import stillroom

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
address: Any = importlib.import_module("address")
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


def test_every_text_has_the_address_of_the_project() -> None:
    own = PROJECT["urls"]["Repository"]
    mkdocs = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert f"repo_url: {own}\n" in mkdocs and citation["repository-code"] == own
    assert address.others() == []


def test_another_address_is_found_and_changed_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, new = address.address(), "https://example.org/me/stillroom"
    page, project = tmp_path / "page.md", tmp_path / "pyproject.toml"
    page.write_text(f"see {own}/issues and {own}-lab", encoding="utf-8")
    project.write_text(f'[project.urls]\nRepository = "{own}"\n', encoding="utf-8")
    monkeypatch.setattr(address, "ROOT", tmp_path)
    monkeypatch.setattr(address, "texts", lambda: iter([page, project]))
    assert address.others() == []
    assert address.change(new) == ["page.md", "pyproject.toml"] and address.address() == new
    assert page.read_text(encoding="utf-8").startswith(f"see {new}/issues")
    page.write_text("see https://github.com/somebody/stillroom", encoding="utf-8")
    assert address.others() == ["page.md: https://github.com/somebody/stillroom"]


def test_the_workflow_runs_what_continuous_integration_runs() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run", "make docs"] and (ROOT / ".ci" / "run").stat().st_mode & 0o100


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
