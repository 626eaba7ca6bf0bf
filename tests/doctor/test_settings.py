"""One table judges settings: before a run, after it, and in it. Each bound is written once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plants import MACHINE

import stillroom.doctor
from stillroom.config import Config, load_config, parse_assignments
from stillroom.config import presets as presets_folder
from stillroom.doctor.diagnose import diagnose
from stillroom.doctor.examine import look
from stillroom.doctor.log_rules import Case
from stillroom.doctor.rules import TABLE, Finding, Settings, Start, doubts, judge_settings, rules_for
from stillroom.doctor.setup import Setup
from stillroom.telemetry.record import LoggedRun

PRESETS = sorted(path.stem for path in Path(next(iter(presets_folder.__path__))).glob("*.toml"))
HARMFUL = [
    ("clamped_logits", {"guard.logit_clamp": 2.5}),
    ("clamped_logits", {"guard.logit_clamp": 30.0}),
    ("clamped_loss", {"guard.loss_clamp": 5.0}),
    ("lax_guard", {"guard.max_skip_share": 0.9}),
    ("patient_guard", {"guard.max_consecutive": 500}),
    ("rate_too_high", {"train.learning_rate": 1.0}),
    ("rate_too_high", {"train.learning_rate": 1e-2, "student.init": "pretrained"}),
    ("rate_too_low", {"train.learning_rate": 1e-9}),
    ("noop_updates", {"train.learning_rate": 1e-6, "precision.mode": "fp16-sr"}),
    ("router_rate_too_high", {"train.learning_rate": 1e-4, "train.router_learning_rate": 1e-2}),
    ("clipped_to_nothing", {"train.max_grad_norm": 0.01}),
    ("unbounded_steps", {"train.beta1": 0.99, "train.beta2": 0.5}),
    ("large_epsilon", {"train.epsilon": 1e-3}),
    ("skipped_norms", {"guard.skip_grad_norm": 2.0}),
    ("never_out_of_warmup", {"train.warmup_ratio": 0.9}),
    ("never_out_of_warmup", {"train.warmup_ratio": 0.4}),
    ("never_out_of_warmup", {"train.max_steps": 100, "train.warmup_steps": 90}),
    (
        "schedule_in_micro_batches",
        {"train.max_steps": 4676, "train.warmup_steps": 4000, "train.gradient_accumulation_steps": 16},
    ),
    ("temperature_too_high", {"objectives.kd.temperature": 4.5}),
    ("temperature_too_low", {"objectives.kd.temperature": 0.1}),
    ("hardly_distils", {"objectives.kd.weight": 0.01, "objectives.ce.weight": 0.99}),
    ("hardly_distils", {"objectives.kd.weight": 0.05, "objectives.ce.weight": 0.95}),
    ("impossible_estimate", {"objectives.kd.divergence": "reverse_kl", "teacher.signal.kind": "sampled"}),
    ("biased_signal", {"teacher.signal.kind": "renormalised"}),
    ("dead_component", {"objectives.contrastive.weight": 0.1, "train.batch_size": 1}),
    (
        "active_when_zero",
        {
            "objectives.feature.weight": 0.1,
            "curriculum.phases": [{"name": "logits", "until": 0.3}, {"name": "all", "until": 1.0}],
        },
    ),
    (
        "gates_follow_the_student",
        {"teacher.router.mode": "sar", "teacher.router.truth_weight": 0.0, "teacher.router.anchor_weight": 0.0},
    ),
    ("teaches_itself", {"teacher.model": "ema", "objectives.ce.weight": 0.0}),
    ("leaking_data", {"data.train": "a.jsonl", "data.eval": "a.jsonl"}),
    ("leaking_data", {"data.train": [{"path": "b.jsonl"}, {"path": "a.jsonl"}], "data.eval": "a.jsonl"}),
    ("bad_lines", {"data.max_bad_share": 0.5}),
    ("never_evaluated", {"train.max_steps": 100, "train.eval_steps": 2000}),
]
IDS = [f"{cause} by {', '.join(over)}" for cause, over in HARMFUL]


def before_a_run(config: Config) -> list[Finding]:
    return judge_settings(Settings(config.to_dict()))


def by_the_doctor(config: Config) -> set[str]:
    (settings,) = (rule for rule in rules_for("setup") if rule.name == "settings")
    return {one.cause for one in look(Setup(MACHINE, config, device=torch.device("cpu")), [settings])}


def after_a_run(config: Config) -> set[str]:
    """What is found in the record of a run of which nothing but its configuration and schedule is known."""
    train, steps = config.train, config.train.max_steps or 100
    share = train.warmup_steps / steps if train.warmup_steps else train.warmup_ratio
    schedule = {
        "optimizer_steps": steps,
        "warmup_steps": round(share * steps),
        "gradient_accumulation": train.gradient_accumulation_steps,
    }
    events = ({"event": "run_start", "schedule": schedule}, {"event": "step", "step": 1, "verdict": "keep"})
    found = {one.cause for one in diagnose(Case(LoggedRun("run", config.to_dict(), events)))}
    return found - ({"never_out_of_warmup"} if "schedule_in_micro_batches" in found else set())  # it follows from it


@pytest.mark.parametrize(("cause", "over"), HARMFUL, ids=IDS)
def test_a_harmful_setting_is_found_and_its_advice_removes_it(cause: str, over: dict[str, Any]) -> None:
    found = {one.cause: one for one in before_a_run(load_config(None, overrides=over))}
    assert cause in found, list(found)
    mended = load_config(None, overrides=over | parse_assignments([found[cause].setting]))
    assert cause not in {one.cause for one in before_a_run(mended)}, found[cause].setting


def test_every_rule_of_settings_has_a_harmful_setting() -> None:
    # Teacher and student that are one model have no single setting that helps: planted for the doctor.
    assert {rule.name for rule in rules_for("settings")} - {"same_model"} == {cause for cause, _ in HARMFUL}


@pytest.mark.parametrize("over", [over for _, over in HARMFUL], ids=IDS)
def test_a_setting_is_judged_alike_before_and_after_a_run(over: dict[str, Any]) -> None:
    config = load_config(None, overrides=over)
    assert by_the_doctor(config) == {one.cause for one in before_a_run(config)} == after_a_run(config)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_judged_alike_by_doctor_diagnose_and_the_run_itself(preset: str) -> None:
    config = load_config(None, preset=preset)
    found = {one.cause for one in before_a_run(config)}
    assert by_the_doctor(config) == found == after_a_run(config)
    start = Start(2.0, 100, None, None, 10, 1e-3, travel=lambda: 1.0, spread=lambda: 0.1)
    assert bool(doubts(start, Settings(config.to_dict()))) == ("hardly_distils" in found)


def test_the_presets_that_hardly_distil_are_the_only_ones_with_a_finding() -> None:
    """They keep the seeds' weights, and say in their comments what these leave unused."""
    found = {name: [one.cause for one in before_a_run(load_config(None, preset=name))] for name in PRESETS}
    wanted = {name: ["hardly_distils"] for name in ("conservative", "fp16-safe", "ultra-stable")}
    assert {name: causes for name, causes in found.items() if causes} == wanted


def test_the_cut_that_is_advised_where_teacher_and_student_are_one_model_cuts_it() -> None:
    config = load_config(None, overrides={"teacher.model": "a", "student.model": "a"})
    start = Start(2.0, 100, 0.0, 1.0, 10, 1e-3, travel=lambda: 1.0, spread=lambda: 0.1)
    settings = Settings(config.to_dict())
    texts = [*(one.remedy for one in judge_settings(settings) if one.cause == "same_model"), *doubts(start, settings)]
    assert len(texts) == 2
    for text in texts:
        advised = load_config(None, overrides=parse_assignments(re.findall(r"--set (\S+)", text)))
        assert advised.student.init == "shrink" and (advised.student.shrink.layers or advised.student.shrink.to)


@pytest.mark.parametrize("is_dry_run", [False, True])
def test_only_a_whole_run_is_warned_that_its_steps_are_too_few(is_dry_run: bool) -> None:
    lazy = {"travel": lambda: 0.01, "spread": lambda: 0.02}
    start = Start(90.0, 100, None, None, 5, 1e-3, **lazy, is_dry_run=is_dry_run)
    assert bool(doubts(start, Settings(load_config(None).to_dict()))) != is_dry_run


def test_the_gravest_is_first() -> None:
    over = {"train.max_steps": 100, "train.eval_steps": 2000, "guard.loss_clamp": 5.0}
    assert [one.severity for one in before_a_run(load_config(None, overrides=over))] == ["problem", "hint"]


def test_damaged_settings_of_a_record_end_in_no_error() -> None:
    """A run's config.json is not trusted: any setting may be missing or of another kind."""

    def damaged(table: dict[str, Any], value: Any) -> Iterator[dict[str, Any]]:
        for key, own in table.items():
            yield {**table, key: value}
            if isinstance(own, dict):
                yield from ({**table, key: inner} for inner in damaged(own, value))

    whole = load_config(None, preset="student-aware").to_dict()
    for value in (None, "x", 0, -1, 1e300, [], [1, 2], {}, {"start": "y"}):
        for table in damaged(whole, value):
            judge_settings(Settings(table))


# -- the table -------------------------------------------------------------------------------------------


def test_evidence_of_a_kind_has_one_rule_of_a_name() -> None:
    names = [(rule.name, rule.sees) for rule in TABLE]
    assert len(set(names)) == len(names)


def test_a_bound_has_a_name_and_is_written_once() -> None:
    """No two modules name a bound alike, and no comparison holds a number that could differ from another's."""
    seen: dict[str, str] = {}
    for path in sorted(Path(next(iter(stillroom.doctor.__path__))).glob("*rules.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            for target in node.targets if isinstance(node, ast.Assign) else []:
                for name in (one.id for one in ast.walk(target) if isinstance(one, ast.Name) and one.id.isupper()):
                    if not name.startswith("_"):
                        assert name not in seen, f"{name} in {path.name} and in {seen[name]}"
                        seen[name] = path.name
        for compared in (node for node in ast.walk(tree) if isinstance(node, ast.Compare)):
            values = [one.value for one in ast.walk(compared) if isinstance(one, ast.Constant)]
            assert not [one for one in values if isinstance(one, float) and one not in (0.0, 1.0)], (
                f"{path.name}:{compared.lineno}: {ast.unparse(compared)}"
            )
