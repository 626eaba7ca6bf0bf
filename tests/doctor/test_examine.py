"""The doctor finds what is planted, says what to try, and calls nothing red that is healthy."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import commands
import plants
import pytest
import tiny
import torch
from plants import MACHINE, PLANTS, Plant

from stillroom.config import load, load_config
from stillroom.doctor.examine import SUBJECTS, examine, look
from stillroom.doctor.rules import Finding, Rule, rules_for
from stillroom.doctor.setup import Setup
from stillroom.teachers.quantize import quantised_bytes

CPU = torch.device("cpu")


def rules_of(subject: str) -> list[Rule]:
    return [rule for rule in rules_for("setup") if rule.subject == subject]


@pytest.fixture
def place(world: Path, tmp_path: Path) -> Path:
    """A copy of the tiny world that a test may damage."""
    return Path(shutil.copytree(world, tmp_path / "place"))


def found(place: Path, plant: Plant) -> list[Finding]:
    """What the checks of the plant's subject say with it in place."""
    over = {**plant.settings, **(plant.prepare(place) or {})}
    config = load_config(overrides=tiny.settings(place, **over))
    setup = Setup(replace(MACHINE, **plant.machine), config, device=CPU)
    return look(setup, rules_of(plant.subject))


@pytest.fixture(scope="module")
def healthy(world: Path) -> dict[str, list[Finding]]:
    """What is said of the world with nothing planted, by subject."""
    config = load_config(overrides=tiny.settings(world, train__max_steps=60))
    setup = Setup(MACHINE, config, device=CPU)
    return {subject: look(setup, rules_of(subject)) for subject in SUBJECTS}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_what_is_planted_is_found(plant: Plant, place: Path, healthy: dict[str, list[Finding]]) -> None:
    findings = found(place, plant)
    matching = [one for one in findings if (one.level, one.cause) == (plant.level, plant.cause)]
    matching = [one for one in matching if all(word in one.evidence for word in plant.words)]
    assert matching, "\n".join(f"{one.level} {one.evidence}" for one in findings)
    assert not any(one in healthy[plant.subject] for one in matching), "it is said of a healthy set-up too"
    for one in findings:
        assert one.level == "green" or any(mark in one.remedy for mark in _COMMANDS), one


# What a command or a setting looks like.
_COMMANDS = (
    "--", "stillroom ", "pip ", "apt ", "=", "sort ", "install", "copy ", "check ", "get ", "use ", "choose ", "mend",
    "clean", "convert", "free ", "take ", "exchange", "end ", "leave", "set ", "put ", "more data", "give ", "resize",
    "did you mean ",
)  # fmt: skip


def test_nothing_is_amber_or_red_where_nothing_is_planted(healthy: dict[str, list[Finding]]) -> None:
    levels = {one.evidence: one.level for findings in healthy.values() for one in findings if one.level != "green"}
    assert levels == {}


def test_there_are_enough_plants_of_every_subject() -> None:
    subjects = {plant.subject for plant in PLANTS} | {"installation"}  # its own are below
    assert subjects == set(SUBJECTS) and len({plant.name for plant in PLANTS}) == len(PLANTS) >= 25


def test_a_quantised_teacher_is_counted_at_its_quantised_size(world: Path) -> None:
    needed: list[int] = []
    (memory,) = (rule for rule in rules_for("setup") if rule.name == "memory")
    for kind in ("none", "int8"):
        config = load_config(overrides=tiny.settings(world, teacher__quantisation=kind))
        setup = Setup(MACHINE, config, device=CPU)
        needed += [finding.numbers["needed_bytes"] for finding in memory.find(setup)]
        needed.append(quantised_bytes(setup.part("models").teacher, kind))
    full, full_teacher, small, small_teacher = needed
    assert full - small == full_teacher - small_teacher > 0


# -- configurations that cannot be read, devices that are not there, installations -----------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nlearning_rat = 1e-3\n", ("unknown key train.learning_rat", "did you mean train.learning_rate")),
        ("[train\n", ("not valid TOML", "presets base")),
        ("[objectives.kd]\nweight = 0.0\n", ("both 0", "")),
        ("[teacher]\ncache = 'x'\n[objectives.feature]\nweight = 0.1\n", ("look inside the teacher", "")),
        ("[train]\nmax_steps = 10\nwarmup_steps = 20\n", ("leaves nothing", "")),
    ],
)
def test_a_configuration_that_cannot_be_used_is_one_red_finding(
    text: str, words: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    report = examine(lambda: load(path), device="cpu")
    (finding,) = report.of("red")
    assert finding.subject == "configuration" and words[0] in finding.evidence and words[1] in finding.remedy
    assert finding.remedy
    assert {one.subject for one in report.findings} <= {"configuration", "machine", "installation"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_that_is_not_there_is_red() -> None:
    (finding,) = examine(None, device="cuda").of("red")
    assert finding.subject == "machine" and "--device cpu" in finding.remedy


def installation(monkeypatch: pytest.MonkeyPatch, name: str, version: str | None) -> list[Finding]:
    right = metadata.version

    def wrong(asked: str) -> str:
        if asked == name and version is None:
            raise metadata.PackageNotFoundError(asked)
        return version if asked == name and version else right(asked)

    monkeypatch.setattr(metadata, "version", wrong)
    return look(Setup(MACHINE, None, device=CPU), rules_of("installation"))


@pytest.mark.parametrize(
    ("name", "version", "word"),
    [
        ("transformers", "4.57.1", "5.3 or later is needed"),
        ("torch", "2.5.1+cu121", "2.6 or later is needed"),
        ("psutil", None, "psutil is not installed"),
    ],
)
def test_an_old_or_missing_package_is_red(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str | None, word: str
) -> None:
    findings = [one for one in installation(monkeypatch, name, version) if one.level == "red"]
    assert len(findings) == 1 and word in findings[0].evidence and "pip install" in findings[0].remedy


def test_an_adapter_without_peft_is_red(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "teacher" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "x"}))
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "peft" else find(name, *rest))
    findings = found(place, plants.red("adapter", "installation"))
    assert any("stillroom[peft]" in one.remedy for one in findings if one.level == "red")


def test_no_compiler_is_amber(monkeypatch: pytest.MonkeyPatch) -> None:
    from stillroom.losses.head import kernel
    from stillroom.losses.head import kernel as compiled

    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("STILLROOM_KERNEL", raising=False)
    monkeypatch.setattr(kernel, "build", compiled.build.__wrapped__)
    monkeypatch.setattr(kernel, "_compiled", kernel._compiled.__wrapped__)
    findings = look(Setup(MACHINE, None, device=CPU), rules_of("machine"))
    assert any(one.level == "amber" and "no C++ compiler" in one.evidence and "g++" in one.remedy for one in findings)


def test_a_built_kernel_with_other_numbers_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    from stillroom.losses.head import kernel
    from stillroom.losses.head.rows import PlainKernel

    reason = "the compiled kernel's numbers differ from the plain one's"
    monkeypatch.setattr(kernel, "_compiled", lambda: kernel.KernelChoice(PlainKernel(), reason))
    findings = look(Setup(MACHINE, None, device=CPU), rules_of("machine"))
    assert [one.remedy for one in findings if one.level == "red"] == ["stillroom selftest"]


def test_a_head_that_cannot_be_described_is_amber(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillroom.models.load.head_error", lambda *_given: 1.0)
    findings = found(place, plants.amber("head", "models"))
    assert sum("head is none that can be described" in one.evidence for one in findings if one.level == "amber") == 2


# -- healthy set-ups -------------------------------------------------------------------------------------


def _instructions(folder: Path) -> dict[str, Any]:
    lines = [{"prompt": f"{line} What then?", "completion": f" {line}"} for line in tiny.sentences(200, 5)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return {"data.train": str(folder / "pairs.jsonl")}


@pytest.mark.parametrize("preset", ["base", "student-aware", "sar", "instruct", "demo"])
def test_nothing_is_red_in_a_healthy_set_up(preset: str, world: Path, moe_world: Path, tmp_path: Path) -> None:
    """The presets as they are, with tiny models and texts in place of real ones; real steps included."""
    place = moe_world if preset == "sar" else world
    kept = ("teacher.model", "student.model", "data.train", "data.max_length")
    over = {key: value for key, value in tiny.settings(place).items() if key in kept}
    if preset == "demo":
        over["data.train_share"] = 1.0
    if preset == "instruct":
        over |= _instructions(tmp_path)
    report = examine(lambda: load(None, preset=preset, overrides=over), device="cpu")
    assert report.of("red") == ()
    assert {one.subject for one in report.findings} == set(SUBJECTS)


@pytest.mark.parametrize(
    ("over", "subject"),
    [
        ({"student__model": "./nosuch"}, "models"),
        ({"teacher__model": "org/nosuch"}, "models"),
        ({"data__train": "nosuch.jsonl"}, "data"),
        ({"teacher__cache": "./nosuch"}, "models"),
    ],
)
def test_an_error_is_told_once_and_with_its_own_subject(over: dict[str, Any], subject: str, world: Path) -> None:
    report = examine(lambda: load(None, overrides=tiny.settings(world, **over)), device="cpu", is_quick=True)
    assert [one.subject for one in report.of("red")] == [subject]


@pytest.mark.parametrize(
    "over",
    [
        {"teacher__cache": "auto"},
        {"teacher__signal__kind": "hybrid"},
        {"student__adapter": {"rank": 4}},
        {"student__init": "shrink", "student__shrink__layers": 1},
        {"objectives__kd__weight": 0.0, "objectives__ce__weight": 1.0},
        {"data__packing": "packed", "train__batch_size": "auto"},
    ],
    ids=lambda over: next(iter(over)),
)
def test_other_ways_to_train_are_not_red(over: dict[str, Any], world: Path) -> None:
    report = examine(lambda: load(None, overrides=tiny.settings(world, **over)), device="cpu")
    assert report.of("red") == ()


def test_a_teacher_on_a_server_needs_no_weights_here(place: Path) -> None:
    for file in (place / "teacher").glob("*.safetensors"):
        file.unlink()
    config = load_config(overrides=tiny.settings(place, teacher__server="http://127.0.0.1:9"))
    findings = look(Setup(MACHINE, config, device=CPU), rules_of("models"))
    assert [one.evidence for one in findings if one.level == "red"] == []


@pytest.mark.parametrize("mode", ["fp16-mixed", "fp16-split", "bf16-mixed"])
def test_the_real_step_says_how_far_it_is_from_fp32(mode: str, place: Path) -> None:
    (finding,) = found(place, plants.red("step", "real step", settings={"precision__mode": mode}))
    assert finding.level == "green" and finding.evidence.startswith(f"{mode} against fp32: loss ")
    gap = float(finding.evidence.partition("gradients apart by ")[2].split()[0])
    assert 0 < gap < 0.1, "half precision is not FP32, and near it"


# -- the command -----------------------------------------------------------------------------------------


def test_the_command_ends_with_2_where_something_is_red_and_prints_80_columns(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(load_config(overrides=tiny.settings(place)).to_dict()))
    before = sorted(tmp_path.rglob("*"))
    words = ["doctor", str(path), "--device", "cpu", "--quick"]
    code, out, err = commands.run(capsys, *words)
    assert code == 0, out
    assert "0 red" in out and "real step" not in out and "checking data" in err
    code, out, _err = commands.run(capsys, *words, "--student", "./nosuch")
    assert code == 2 and "1 red" in out
    assert max(map(len, out.splitlines())) <= 80 and "\x1b" not in out
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left behind"


def test_the_findings_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nlearning_rat = 1e-3\n")
    code, out, _err = commands.run(capsys, "doctor", str(path), "--json")
    report = json.loads(out)
    assert code == 2 and report["red"] == 1
    assert set(report["findings"][0]) == {"level", "subject", "cause", "what", "try"}


def test_a_finding_that_is_not_green_has_something_to_try() -> None:
    with pytest.raises(ValueError, match="nothing to try"):
        Finding("warning", "the moon is full")
