"""What doctor, plan and diagnose know of the student's own text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import begun
import pytest
import tiny
import torch
from plants import MACHINE
from trl_templates import template

from stillroom.config import load_config
from stillroom.doctor.diagnose import diagnose
from stillroom.doctor.log_rules import Case
from stillroom.doctor.plan.plan import find_target, make_plan
from stillroom.doctor.rules import Finding
from stillroom.doctor.setup import Setup
from stillroom.doctor.setup_rules import end_marks, teacher_ends
from stillroom.telemetry.record import LoggedRun

OWN = {"rollouts.share": 0.5, "rollouts.every": 4, "rollouts.max_new_tokens": 8, "rollouts.batch_size": 4}


# -- diagnose ------------------------------------------------------------------------------------------------


def record(num_rounds: int = 6, **change: Callable[[float], Any]) -> Case:
    """Rounds every four steps; `change` is what a key is at each share of the run."""

    def at(key: str, progress: float, usual: Any) -> Any:
        return change[key](progress) if key in change else usual

    events: list[dict[str, Any]] = [{"event": "run_start", "config": {"rollouts": {"every": 4}}}]
    for number in range(num_rounds):
        progress = number / (num_rounds - 1)
        events.append(
            {
                "event": "rollouts", "round": number, "step": 4 * number, "data_length": 10.0,
                "mean_length": at("mean_length", progress, 10.0), "entropy": at("entropy", progress, 2.0),
                "ended": at("ended", progress, {"end": 32, "length": 0, "loop": 0}),
            }
        )  # fmt: skip
        for place in range(4):
            kd = at("kd", progress + place / 100, 1.0)
            sources = {"rollouts": {"targets": 40, "kd": kd}}
            events.append(
                {"event": "step", "step": 4 * number + place + 1, "verdict": "keep", "sources": sources, "terms": {}}
            )
    return Case(LoggedRun("run", {"rollouts": {"every": 4}}, tuple(events)))


def causes(case: Case) -> dict[str, Finding]:
    return {one.cause: one for one in diagnose(case)}


OURS = {"length_inflation", "rollout_loops", "entropy_collapse", "stale_rounds"}


def test_sound_rounds_have_no_finding() -> None:
    assert not OURS & set(causes(record()))
    assert not OURS & set(causes(record(entropy=lambda share: 2.0 - 1.9 * share, kd=lambda share: 1.0 - 0.9 * share)))


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("length_inflation", {"mean_length": lambda share: 10.0 + 30.0 * share}),
        ("rollout_loops", {"ended": lambda share: {"end": 24, "loop": 8}}),
        ("entropy_collapse", {"entropy": lambda share: 2.0 - 1.5 * share, "kd": lambda share: 0.5 + share}),
        ("stale_rounds", {"kd": lambda share: 1.0 - 24.0 * (share * 100 % 20 / 100)}),
    ],
)
def test_a_fault_of_rollouts_is_named(cause: str, change: dict[str, Any]) -> None:
    found = causes(record(**change))
    assert OURS & set(found) == {cause}
    assert found[cause].setting and found[cause].numbers and found[cause].steps


@pytest.mark.parametrize("junk", [None, "many", {"round": "a"}, {"round": 1, "ended": 3, "mean_length": "long"}])
def test_a_record_that_is_not_trusted_is_no_error(junk: Any) -> None:
    event = {"event": "rollouts", **(junk if isinstance(junk, dict) else {"round": junk})}
    diagnose(Case(LoggedRun("run", {}, (event, {"event": "step", "step": 1, "verdict": "keep", "sources": junk}))))


# -- doctor --------------------------------------------------------------------------------------------------


def setup_of(folder: Path, **over: Any) -> Setup:
    config = load_config(overrides=tiny.settings(folder) | OWN | {"data.packing": "rows"} | over)
    return Setup(MACHINE, config, device=torch.device("cpu"))


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two models with one tokenizer and a chat template."""
    for name, seed in (("teacher", 0), ("student", 1)):
        begun.save(tmp_path / name, begun.byte_tokenizer(chat_template=template("llama3")), seed=seed)
    rows = [{"prompt": f"room {number}?", "completion": " still"} for number in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_equal_end_marks_and_templates_are_no_finding(pair: Path) -> None:
    assert list(end_marks(setup_of(pair))) == []


def test_other_end_marks_are_red(pair: Path) -> None:
    path = pair / "student" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<sop>"}))
    found = list(end_marks(setup_of(pair)))
    assert [(one.cause, one.level) for one in found] == [("end_marks_differ", "red")]


def test_other_templates_are_red(pair: Path) -> None:
    begun.byte_tokenizer(chat_template=template("llama3") + " ").save_pretrained(pair / "student")
    found = list(end_marks(setup_of(pair)))
    assert [(one.cause, one.level) for one in found] == [("templates_differ", "red")]


def test_a_teacher_that_does_not_end_answers_is_red(pair: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert [one.level for one in teacher_ends(setup_of(pair))] == ["green"], "a random teacher gives any token 1/320"
    model = AutoModelForCausalLM.from_pretrained(pair / "teacher")
    with torch.no_grad():
        model.lm_head.weight[2] = -50 * model.lm_head.weight.mean(0)
        model.lm_head.weight.mul_(200)
    model.save_pretrained(pair / "teacher")
    found = list(teacher_ends(setup_of(pair)))
    assert [(one.cause, one.level) for one in found] == [("teacher_does_not_end", "red")]


# -- the same without rollouts -------------------------------------------------------------------------------


def plain_setup(folder: Path, **over: Any) -> Setup:
    config = load_config(overrides=tiny.settings(folder) | over)
    return Setup(MACHINE, config, device=torch.device("cpu"))


def test_a_base_student_under_an_instruct_teacher_is_named_in_every_run_with_answers(pair: Path) -> None:
    assert list(end_marks(plain_setup(pair))) == []
    begun.byte_tokenizer().save_pretrained(pair / "student")
    (pair / "student" / "chat_template.jinja").unlink(missing_ok=True)
    found = list(end_marks(plain_setup(pair)))
    assert ("templates_differ", "amber") in [(one.cause, one.level) for one in found]
    assert "none" in next(one.evidence for one in found if one.cause == "templates_differ")
    (pair / "train.jsonl").write_text("\n".join(json.dumps({"text": f"room {number}"}) for number in range(40)))
    assert list(end_marks(plain_setup(pair))) == [], "plain text has no answers"


def test_a_teacher_that_does_not_end_answers_is_amber_without_rollouts(pair: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair / "teacher")
    with torch.no_grad():
        model.lm_head.weight[2] = -50 * model.lm_head.weight.mean(0)
        model.lm_head.weight.mul_(200)
    model.save_pretrained(pair / "teacher")
    found = list(teacher_ends(plain_setup(pair)))
    assert [(one.cause, one.level) for one in found] == [("teacher_does_not_end", "amber")]


# -- plan ----------------------------------------------------------------------------------------------------


def test_a_plan_counts_the_cache_and_the_time_of_writing(world: Path) -> None:
    config = load_config(overrides=tiny.settings(world) | OWN)
    plan = make_plan(config, find_target("cpu"), is_quick=True, probes=True)
    plain = make_plan(load_config(overrides=tiny.settings(world)), find_target("cpu"), is_quick=True)
    assert "rounds are written" in plan.layout.moments and "rounds are written" not in plain.layout.moments
    assert plan.cost.answers_per_step == 2.0 and plain.cost.answers_per_step == 0.0
    assert plan.cost.writing_seconds_per_step and plan.cost.seconds_per_step
    assert plan.cost.seconds_per_step > plan.cost.writing_seconds_per_step


def test_a_large_piece_makes_the_cache_the_largest_moment(world: Path) -> None:
    config = load_config(overrides=tiny.settings(world) | OWN | {"rollouts.batch_size": 2**14})
    plan = make_plan(config, find_target("cpu"), is_quick=True)
    assert plan.layout.moment == "rounds are written"
    # 2 (keys, values) x 1 layer x width 32 x 4 bytes x rows x 32 positions
    assert plan.layout.device["KV cache"] == 2 * 1 * 32 * 4 * 2**14 * 32
