"""Another package's objective, divergence and reader: the example of docs/guides/extending.md, installed and used."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from commands import run
from refusals import refused

from stillroom.config import load_config
from stillroom.config import schema as extensions
from stillroom.config.schema import DIVERGENCES, OBJECTIVES, READERS, Registry
from stillroom.core.errors import ConfigError
from stillroom.losses import divergences

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "extending.md"
KEYS = {
    "objectives.kd.divergence": "hellinger",
    "objectives.loudness": {"weight": 0.1, "bound": {"start": 2.0, "end": 0.5}},
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def install(folder: Path) -> Path:
    """The package of the page as an installer leaves it: the module, and beside it what it says about itself."""
    (folder / "drams.py").write_text(blocks("python")[0], encoding="utf-8")
    project = tomllib.loads(blocks("toml")[0])["project"]
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    about = folder / f"drams-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: drams\nVersion: {project['version']}\n")
    (about / "entry_points.txt").write_text("\n".join(groups))
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package in this process, and gone again afterwards."""
    (tmp_path / "site").mkdir()
    folder = install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(folder))
    for registry in (OBJECTIVES, DIVERGENCES, READERS):
        monkeypatch.setattr(registry, "_things", dict(registry._things))
        monkeypatch.setattr(registry, "_entries_by_name", None)
    yield folder
    sys.modules.pop("drams", None)
    importlib.invalidate_caches()


@pytest.mark.usefixtures("installed")
def test_an_installed_package_brings_an_objective_a_divergence_and_a_reader(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").mkdir()
    text = "".join(f"# {number}\n{line}\n" for number, line in enumerate(tiny.sentences(60, 1)))
    (tmp_path / "notes" / "one.md").write_text(text)
    (tmp_path / "run.toml").write_text(blocks("toml")[1])
    settings = tiny.settings(world, data__train=str(tmp_path / "notes" / "*.md"), train__max_steps=2)
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    out = tmp_path / "run"
    code, _out, err = run(capsys, "distill", str(tmp_path / "run.toml"), *words, "--out", str(out), "--device", "cpu")
    assert code in (0, 22), err  # two steps need not make a better student
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert [set(step["terms"]) for step in steps] == 2 * [{"kd", "loudness"}]
    assert all(step["terms"]["loudness"]["raw"] > 0 and step["terms"]["loudness"]["weight"] == 0.1 for step in steps)
    evaluated = [event for event in events if event["event"] == "eval" and event.get("terms")]
    assert evaluated and all("loudness" in event["terms"] for event in evaluated)
    assert "rows of the head: plain PyTorch" in str(events)


def test_its_section_is_checked_like_ours(installed: Path) -> None:
    config = load_config(overrides=KEYS)
    assert load_config(overrides=config.to_dict()) == config, "what a run keeps of its configuration can be read again"
    for key, value, said, advice in (
        ("objectives.loudness.weight", -1.0, "objectives.loudness.weight: must be at least 0", ""),
        ("objectives.loudness.bound", 99.0, "objectives.loudness.bound: must be between", ""),
        ("objectives.loudness.wieght", 1.0, "unknown key objectives.loudness.wieght", "objectives.loudness.weight"),
        ("objectives.loudnes.weight", 1.0, "unknown key objectives.loudnes", "objectives.loudness"),
        ("objectives.kd.divergence", "helinger", "did you mean hellinger", ""),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(overrides={**KEYS, key: value})
        assert said in caught.value.what and advice in " ".join(caught.value.advice)
    several = {"objectives.loud.weight": 1.0, "objectives.loudness.bound": 99.0, "objectives.kd.temperature": -1.0}
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=several)
    for word in ("objectives.loud;", "objectives.loudness.bound", "objectives.kd.temperature: must be at least"):
        assert word in caught.value.what, "all that is wrong is told at once"


def test_its_divergence_has_the_slopes_it_says(installed: Path) -> None:
    student, teacher = torch.randn(2, 5, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    student.requires_grad_()
    value = divergences.on_logits(divergences.make("hellinger"), student, teacher, 1.0)
    expected = 1.0 - (student.softmax(-1) * teacher.softmax(-1)).sqrt().sum(-1)
    torch.testing.assert_close(value, expected)
    (found,) = torch.autograd.grad(value.sum(), student)
    (wanted,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(found, wanted)


def test_names_are_known_before_anything_is_imported(installed: Path) -> None:
    code = (
        "import sys; from stillroom.config.schema import DIVERGENCES, OBJECTIVES;"
        "assert 'loudness' in OBJECTIVES and 'hellinger' in DIVERGENCES.names();"
        "sys.exit('torch' in sys.modules or 'drams' in sys.modules)"
    )
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False).returncode
        == 0
    )


def test_every_name_that_is_ours_is_registered_and_none_can_be_replaced() -> None:
    for name in DIVERGENCES._known:
        assert DIVERGENCES.find(name)
    assert set(OBJECTIVES._known) == set(load_config().objectives.sections)
    for name in set(OBJECTIVES._known) - {"kd", "ce"}:  # one object, made by the mix
        assert OBJECTIVES.find(name)
    with refused(ConfigError, "", "jsd"):
        divergences.register("jsd", lambda settings: divergences.ForwardKL())


def test_a_package_that_is_broken_is_told_by_its_name(installed: Path) -> None:
    (installed / "drams.py").write_text("raise RuntimeError('out of spirits')\n")
    with refused(ConfigError, "drams:LOUDNESS", "loudness", "out of spirits"):
        load_config(overrides=KEYS)
    (installed / "drams.py").write_text("LOUDNESS = 7\n")
    with refused(ConfigError, "drams", "loudness"):
        load_config(overrides=KEYS)


def test_a_name_that_two_packages_bring_is_refused_when_it_is_used(installed: Path) -> None:
    about = installed / "other-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[stillroom.objectives]\nloudness = elsewhere:LOUDNESS\n")
    assert load_config().objectives.kd.weight == 1.0, "whoever does not use the name does not care"
    with refused(ConfigError, "", "drams", "other"):
        load_config(overrides=KEYS)


def test_a_registry_is_empty_until_something_is_in_it() -> None:
    registry: Registry[int] = extensions.Registry("stillroom.nothing", "number", accepts=lambda thing: True)
    assert registry.names() == () and "one" not in registry
    registry.register("one", 1)
    assert registry.find("one") == 1
    with pytest.raises(ConfigError) as caught:
        registry.find("on")
    assert "did you mean one?" in caught.value.advice
