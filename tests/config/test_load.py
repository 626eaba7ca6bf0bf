from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from refusals import refused

from stillroom.config import load, load_config, parse_assignments, preset_names
from stillroom.config.schema import Config, Ramp
from stillroom.core.errors import ConfigError

LEGACY = {
    "batch_size": 2,
    "gradient_accumulation_steps": 16,
    "learning_rate": 3e-5,
    "warmup_steps": 500,
    "max_length": 256,
    "temperature": 2.0,
    "kd_top_k": 256,
    "use_curriculum": True,
    "use_gradient_checkpointing": True,
    "eval_steps": 2000,
}


def test_a_legacy_json_configuration_is_accepted_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "emergency_fix_config.json"
    path.write_text(json.dumps(LEGACY))
    loaded = load(path)
    config = loaded.config
    assert (config.train.batch_size, config.train.gradient_accumulation_steps) == (2, 16)
    assert config.train.learning_rate == 3e-5 and config.train.warmup_steps == 500
    assert config.data.max_length == 256 and config.train.eval_steps == 2000
    assert config.objectives.kd.temperature == 2.0 and config.objectives.kd.top_k == 256
    assert config.student.gradient_checkpointing
    assert len(loaded.notes) == len(LEGACY), "one note for each mapping"


def test_the_legacy_curriculum_brings_the_inner_terms_in_later_whatever_the_order_of_keys(tmp_path: Path) -> None:
    table = {"use_curriculum": True, "alpha_feature": 0.2, "alpha_contrastive": 0.0, "attention_layers": 3, "seed": 1}
    for keys in (list(table), list(reversed(table))):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({key: table[key] for key in keys}))
        objectives = load(path).config.objectives
        assert objectives.feature.weight == Ramp(start=0.0, end=0.2, begin=0.3, until=0.6)
        assert objectives.layerwise.weight == Ramp(start=0.0, end=0.05, begin=0.6, until=0.8)
        assert objectives.kd.weight == 0.7 and objectives.attention.attention_layers == 3
        assert "contrastive" not in objectives.inner_weights


def test_legacy_weights_without_a_curriculum_are_constant(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"alpha_attention": 0.3, "alpha_layerwise": 0.4, "attention_layers": 0, "seed": 1}))
    loaded = load(path)
    assert loaded.config.objectives.inner_weights == {"layerwise": 0.4}, "0 attention layers: no attention term"
    assert len(loaded.notes) == 4


def test_legacy_router_settings_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "router.json"
    given = {"router_lr": 5e-4, "router_anchor_weight": 1e-4, "router_load_balance_weight": 1e-3}
    path.write_text(json.dumps({**given, "router_entropy_weight": 1e-4}))
    loaded = load(path)
    router = loaded.config.teacher.router
    assert loaded.config.train.router_learning_rate == 5e-4
    assert (router.anchor_weight, router.load_balance_weight, router.entropy_weight) == (1e-4, 1e-3, 1e-4)
    assert len(loaded.notes) == 4 and "no gradient" in " ".join(loaded.notes)


def test_a_stored_teacher_has_no_gates() -> None:
    with refused(ConfigError, "", "teacher.router.mode", "teacher.cache"):
        load_config(overrides={"teacher.cache": "somewhere", "teacher.router.mode": "sar"})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.lerning_rate", "train.learning_rate"),
        ("train.max_step", "train.max_steps"),
        ("objectives.kd.temprature", "objectives.kd.temperature"),
        ("seeds", "train.seed"),
    ],
)
def test_an_unknown_key_is_met_with_the_one_that_was_meant(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={key: 1})
    assert "unknown key" in caught.value.what and meant in " ".join(caught.value.advice)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_explains_itself(name: str) -> None:
    load_config(preset=name)
    from stillroom.config import preset_text

    text = preset_text(name)
    assert text.startswith("# "), "the first line says what the preset is for"
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            assert "#" in line, f"{name}: {line} has no reason"


def test_later_sources_win_field_by_field(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "base"\n[train]\nlearning_rate = 0.5\nseed = 3\n')
    config = load_config(path, overrides={"train.seed": 4})
    assert config.train.learning_rate == 0.5 and config.train.seed == 4
    assert config.train.schedule == "cosine"


def test_none_is_the_word_where_a_setting_has_that_word_and_no_value_elsewhere() -> None:
    words = ["teacher.quantisation=none", "telemetry.tracker=none", "teacher.cache=none", "student.adapter=none"]
    config = load_config(overrides=parse_assignments(words))
    assert (config.teacher.quantisation, config.telemetry.tracker, config.teacher.cache) == ("none", "none", None)


def test_assignments_are_toml_with_bare_words() -> None:
    words = ["train.max_steps=10", "data.train=my file.jsonl", "train.learning_rate=1e-4", "student.init=random"]
    assert parse_assignments(words) == {
        "train.max_steps": 10,
        "data.train": "my file.jsonl",
        "train.learning_rate": 1e-4,
        "student.init": "random",
    }


@pytest.mark.parametrize(
    "overrides",
    [
        {"objectives.kd.weight": 0.0},
        {"train.warmup_steps": 10, "train.max_steps": 10},
        {"train.learning_rate": -1},
        {"precision.mode": "fp8"},
        {"teacher.trust_remote_code": True},
        {"objectives.kd.temperature": 0.0},
        {"objectives.kd.temperature": {"start": 2.0, "end": -1.0}},
        {"objectives.kd.beta": {"start": -0.5, "end": 1.0}},
        {"objectives.kd.alpha": 2},
        {"objectives.ce.weight": -0.1},
        {"objectives.feature.weight": {"start": 0.0, "end": -1.0}},
        {"objectives.kd.top_k": {"start": -1, "end": 8}},
        {"objectives.kd.weight": math.inf},
        {"train.learning_rate": math.inf},
        {"train.learning_rate": math.nan},
    ],
)
def test_impossible_settings_are_refused_by_name(overrides: dict[str, object]) -> None:
    with refused(ConfigError, "", next(iter(overrides)).rpartition(".")[2]):
        load_config(overrides=overrides)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("x", "objectives.kd.weight: expected a number, got 'x'"),
        ({"start": 2}, "objectives.kd.weight.end: Field required"),
        ({"start": 2, "end": 1, "shape": "cosin"}, "objectives.kd.weight.shape: Input should be 'linear', 'cosine' or"),
    ],
)
def test_a_wrong_number_or_ramp_is_told_what_it_lacks_and_nothing_else(value: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={"objectives.kd.weight": value})
    assert str(caught.value).startswith(said)
    assert ";" not in str(caught.value)


def test_a_resolved_configuration_reads_back_the_same() -> None:
    config = load_config(preset="demo", overrides={"objectives.kd.weight": {"start": 1, "end": 0}})
    assert Config.model_validate(json.loads(json.dumps(config.to_dict()))) == config


def test_a_removed_setting_says_what_became_of_it_and_one_that_is_off_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(overrides={"teacher.ranks": 1})
    assert error.value.where == "command line" and "teacher.placement" in error.value.what
    stored = tmp_path / "config.json"
    stored.write_text(json.dumps({"teacher": {"ranks": 0}}))
    assert load_config(stored) == load_config()


def test_a_mistyped_section_inside_a_section_is_recognised() -> None:
    with refused(ConfigError, "", "objectives.ce?"):
        load_config(overrides={"objectives.cee.weight": 1.0})
