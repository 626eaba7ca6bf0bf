"""A model of the user's own is never replaced; the seed's own names are, and a line says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import recipe_runs as recipe_runs  # puts the recipes on the path
from refusals import refused

from _seed.stand_ins import VARIABLE, Names, choose
from stillroom.core.errors import ConfigError

SEED = Names("models/teacher-model", "gpt2", "data/quantumbench.jsonl")
BUILTIN = Names("builtin:teacher", "builtin:student", "builtin:qa")


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in VARIABLE.values():
        monkeypatch.delenv(name, raising=False)


def test_names_of_the_seed_that_are_not_here_are_replaced_as_a_pair_and_said() -> None:
    chosen = choose(SEED, SEED, BUILTIN)
    assert list(chosen.settings.values()) == ["builtin:teacher", "builtin:student", "builtin:qa"]
    assert len(chosen.remarks) == 3 and all("which is not here" in remark for remark in chosen.remarks)


def test_names_of_the_user_are_kept_whether_or_not_they_are_here() -> None:
    mine = Names("mine/teacher", "mine/student", "mine.jsonl")
    chosen = choose(mine, SEED, BUILTIN)
    assert list(chosen.settings.values()) == ["mine/teacher", "mine/student", "mine.jsonl"] and not chosen.remarks


def test_a_teacher_that_is_here_keeps_the_student_that_the_seed_names() -> None:
    Path("models/teacher-model").mkdir(parents=True)
    chosen = choose(SEED, SEED, BUILTIN)
    assert chosen.settings["teacher.model"] == "models/teacher-model" and chosen.settings["student.model"] == "gpt2"


def test_the_environment_stands_in_for_the_seed_s_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE["student"], "small")
    chosen = choose(Names("mine", "gpt2", "mine.jsonl"), SEED, BUILTIN)
    assert chosen.settings["student.model"] == "small"
    assert chosen.remarks == (f"small stands in for the student gpt2: {VARIABLE['student']}",)
    assert choose(Names("mine", "mine-too", "mine.jsonl"), SEED, BUILTIN).settings["student.model"] == "mine-too"


@pytest.mark.parametrize("given", [Names("mine", None), Names(None, "mine")])
def test_one_model_alone_is_refused_where_the_seed_names_none(given: Names) -> None:
    with refused(ConfigError, "", "teacher", "student"):
        choose(given, Names(), BUILTIN)
