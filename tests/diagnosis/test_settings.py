"""Harmful settings are found in a configuration alone, and none in a preset that has no clamp."""

from __future__ import annotations

from typing import Any

import pytest

from stillroom.config import load_config, parse_assignments
from stillroom.diagnosis.settings import harmful_settings

HARMFUL = [
    ("clamped_logits", {"guard.logit_clamp": 2.5}),
    ("clamped_loss", {"guard.loss_clamp": 5.0}),
    ("rate_too_high", {"train.learning_rate": 1.0}),
    ("rate_too_low", {"train.learning_rate": 1e-9}),
    ("noop_updates", {"train.learning_rate": 2e-6, "precision.mode": "fp16-sr"}),
    ("router_rate_too_high", {"train.learning_rate": 1e-4, "train.router_learning_rate": 1e-2}),
    ("clipped_to_nothing", {"train.max_grad_norm": 0.01}),
    ("skipped_norms", {"guard.skip_grad_norm": 2.0}),
    ("never_out_of_warmup", {"train.warmup_ratio": 0.9}),
    ("never_out_of_warmup", {"train.max_steps": 100, "train.warmup_steps": 90}),
    (
        "schedule_in_micro_batches",
        {"train.max_steps": 4676, "train.warmup_steps": 4000, "train.gradient_accumulation_steps": 16},
    ),
    ("temperature_too_high", {"objectives.kd.temperature": 20.0}),
    ("hardly_distils", {"objectives.kd.weight": 0.01, "objectives.ce.weight": 0.99}),
    ("biased_signal", {"teacher.signal.kind": "renormalised"}),
    ("dead_component", {"objectives.contrastive.weight": 0.1, "train.batch_size": 1}),
    (
        "active_when_zero",
        {
            "objectives.feature.weight": 0.1,
            "curriculum.phases": [{"name": "logits", "until": 0.3}, {"name": "all", "until": 1.0}],
        },
    ),
    ("leaking_data", {"data.train": "a.jsonl", "data.eval": "a.jsonl"}),
    ("bad_lines", {"data.max_bad_share": 0.5}),
    ("never_evaluated", {"train.max_steps": 100, "train.eval_steps": 2000}),
]


@pytest.mark.parametrize(("cause", "over"), HARMFUL, ids=[f"{cause} by {', '.join(over)}" for cause, over in HARMFUL])
def test_a_harmful_setting_is_found_and_its_advice_removes_it(cause: str, over: dict[str, Any]) -> None:
    found = {one.cause: one for one in harmful_settings(load_config(None, overrides=over).to_dict())}
    assert cause in found, list(found)
    mended = load_config(None, overrides=over | parse_assignments([found[cause].setting]))
    assert cause not in {one.cause for one in harmful_settings(mended.to_dict())}, found[cause].setting


@pytest.mark.parametrize("preset", ["base", "student-aware", "sar", "instruct", "demo", "quantumbench"])
def test_presets_without_clamps_have_no_harmful_setting(preset: str) -> None:
    assert not [one for one in harmful_settings(load_config(None, preset=preset).to_dict()) if one.is_alarming]


def test_the_gravest_is_first() -> None:
    over = {"train.max_steps": 100, "train.eval_steps": 2000, "guard.loss_clamp": 5.0}
    found = harmful_settings(load_config(None, overrides=over).to_dict())
    assert [one.severity for one in found] == ["problem", "hint"]
