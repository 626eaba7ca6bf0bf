"""Laws of settings that were given: each is read or noted, and nothing next to them is left to the toys."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

import stillroom
from stillroom.config import load, load_config, preset_names, preset_text
from stillroom.config.load import (
    DIVERGENCE_SETTINGS,
    RULES,
    all_keys,
    embedded_notes,
    is_hub_id,
    refuse_gaps,
    refuse_unread,
    unread,
    unread_notes,
)
from stillroom.config.schema import Config, WriteConfig
from stillroom.core.errors import ConfigError
from stillroom.losses import divergences
from stillroom.telemetry import read_events
from stillroom.training.distill import distill

# Settings that every run reads, or that depend on its records, its device or the number of its processes.
ALWAYS = [
    "eval.select",
    "eval.prompts",
    "eval.tasks",
    *(f"write.{name}" for name in WriteConfig.model_fields),  # by a command of its own
    "teacher.model",
    "teacher.trust_remote_code",
    "teacher.allow_base",
    "student.allow_base",
    "data.day",
    "student.trust_remote_code",
    "student.init",
    "student.vocabulary",
    "student.gradient_checkpointing",
    "student.adapter.kind",
    "student.adapter.rank",
    "student.adapter.alpha",
    "student.adapter.targets",
    "student.adapter.dropout",
    "student.adapter.base_dtype",
    "student.quantise",
    "student.quantise_layers",
    "data.train",
    "data.eval",
    "data.train_share",
    "data.max_records",
    "data.max_length",
    "data.packing",
    "data.group_by_length",
    "data.order",
    "data.cache",
    "data.bos",
    "data.chat",
    "data.thoughts",
    "data.on_long",
    "data.train_on_prompt",
    "data.max_bad_share",
    "objectives.chunk_tokens",
    "objectives.kernel",
    "curriculum.phases",
    "train.max_steps",
    "train.batch_size",
    "train.gradient_accumulation_steps",
    "train.learning_rate",
    "train.schedule",
    "train.optimizer",
    "train.warmup_steps",
    "train.max_warmup_share",
    "train.weight_decay",
    "train.beta1",
    "train.beta2",
    "train.epsilon",
    "train.max_grad_norm",
    "train.eval_steps",
    "train.save_steps",
    "train.compile",
    "train.seed",
    "train.early_stopping",
    "train.max_minutes",
    "train.strategy",
    "train.shard_size",
    "train.peer_timeout_minutes",
    "precision.mode",
    "precision.moments",
    "guard.on_nonfinite",
    "guard.max_consecutive",
    "guard.max_retries",
    "guard.max_skip_share",
    "guard.spike_z",
    "guard.skip_grad_norm",
    "guard.max_rollbacks",
    "guard.on_exhausted",
    "guard.snapshot_steps",
    "guard.snapshot_ring",
    "guard.logit_clamp",
    "guard.loss_clamp",
    "eval.max_batches",
    "eval.batch_size",
    "eval.max_perplexity",
    "eval.min_share",
    "rollouts.prompts",
    "rollouts.share",
    "rollouts.every",
    "rollouts.keep_rounds",
    "rollouts.samples",
    "rollouts.max_new_tokens",
    "rollouts.prompt_tokens",
    "rollouts.temperature",
    "rollouts.top_p",
    "rollouts.batch_size",
    "rollouts.answers",
    "rollouts.on_loop",
    "checkpoint.keep",
    "checkpoint.background",
    "telemetry.log_steps",
    "telemetry.gradient_steps",
    "telemetry.tracker",
]


def test_every_setting_is_always_read_or_has_a_rule() -> None:
    own = tuple(Config().objectives.sections)
    for key in all_keys():
        is_of_objective = key.startswith(tuple(f"objectives.{name}." for name in own))
        is_ruled = is_of_objective or any(rule.covers(key) for rule in RULES)
        assert is_ruled != (key in ALWAYS), f"{key}: add a rule to config/load.py, or name it here"
    assert set(ALWAYS) <= set(all_keys())
    patterns = [pattern for rule in RULES for pattern in rule.keys.split()]
    assert all(fnmatch.filter(all_keys(), pattern) for pattern in patterns), "a rule of no setting"


def test_the_table_of_divergences_is_theirs() -> None:
    for name in divergences.names():
        assert divergences.settings_of(name) == DIVERGENCE_SETTINGS.get(name, ()), name


UNREAD: list[tuple[dict[str, Any], str]] = [
    ({"teacher.revision": "v1.0"}, "teacher.revision"),
    ({"student.revision": "v1.0", "student.model": "."}, "student.revision"),
    ({"teacher.requests.retries": 3}, "teacher.requests.retries"),
    ({"teacher.router.every": 3}, "teacher.router.every"),
    ({"teacher.router.patterns": ["a*"]}, "teacher.router.patterns"),
    ({"teacher.router.mode": "truth", "teacher.router.student_weight": 0.5}, "teacher.router.student_weight"),
    ({"teacher.router.mode": "sar", "teacher.router.force": True}, "teacher.router.force"),
    ({"objectives.kd.alpha": 0.3}, "objectives.kd.alpha"),
    ({"objectives.kd.beta": 0.3}, "objectives.kd.beta"),
    ({"objectives.kd.interpolation": {"start": 0.1, "end": 0.9}}, "objectives.kd.interpolation"),
    ({"objectives.kd.token_criterion": "entropy"}, "objectives.kd.token_criterion"),
    ({"objectives.feature.kind": "cosine"}, "objectives.feature.kind"),
    ({"objectives.attention.weight": 1.0, "objectives.attention.attention_layers": 0,
      "objectives.attention.layers": "last"}, "objectives.attention.layers"),
    ({"objectives.kd.weight": 0, "objectives.ce.weight": 1, "objectives.kd.top_k": 4}, "objectives.kd.top_k"),
    ({"objectives.kd.weight": 0, "objectives.ce.weight": 1, "teacher.placement": "offload"}, "teacher.placement"),
    ({"data.streaming": True, "data.train": "a.jsonl"}, "data.streaming"),
    ({"data.min_coverage": 0.9}, "data.min_coverage"),
    ({"data.eval_share": 0.2, "data.eval": "b.jsonl"}, "data.eval_share"),
    ({"data.template": "{a}", "data.train": [{"path": "a.jsonl", "template": "{b}"}]}, "data.template"),
    ({"train.step_rows": 64}, "train.step_rows"),
    ({"train.epochs": 2.0, "train.max_steps": 10}, "train.epochs"),
    ({"train.warmup_ratio": 0.2, "train.warmup_steps": 5}, "train.warmup_ratio"),
    ({"train.schedule": "constant", "train.min_learning_rate_ratio": 0.5}, "train.min_learning_rate_ratio"),
    ({"train.router_learning_rate": 1e-4}, "train.router_learning_rate"),
    ({"train.projector_learning_rate": 1e-4}, "train.projector_learning_rate"),
    ({"teacher.max_quantisation_kl": 0.5}, "teacher.max_quantisation_kl"),
    ({"teacher.server": "http://a:1", "teacher.dtype": "float16"}, "teacher.dtype"),
    ({"teacher.signal.compare": "stored"}, "teacher.signal.compare"),
    ({"student.init": "shrink", "student.shrink.layers": [0, 1], "student.shrink.method": "loss"},
     "student.shrink.method"),
    ({"student.init": "shrink", "student.model": "ignored"}, "student.model"),
    ({"student.shrink.layers": 0}, "student.shrink.layers"),
    ({"precision.mode": "fp32", "precision.initial_loss_scale": 2.0}, "precision.initial_loss_scale"),
    ({"eval.samples": 0, "eval.sample_tokens": 9}, "eval.sample_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "key"), UNREAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_setting_that_was_given_and_is_not_read_is_noted(settings: dict[str, Any], key: str) -> None:
    config = load_config(overrides=settings)
    assert [found for found, _why in unread(config)] == [key]
    with pytest.raises(ConfigError):
        refuse_unread(config)


@pytest.mark.parametrize(
    "settings",
    [
        {"teacher.model": "org/name", "teacher.revision": "v1.0"},
        {"teacher.server": "http://a:1", "teacher.requests.retries": 3},
        {"teacher.router.mode": "sar", "teacher.router.every": 3, "teacher.router.student_weight": 0.5},
        {"objectives.kd.divergence": "alpha_beta", "objectives.kd.alpha": 0.3, "objectives.kd.beta": 0.3},
        {"objectives.feature.weight": {"start": 0, "end": 1}, "objectives.feature.kind": "cosine"},
        {"data.train": ["a.jsonl", "hf:org/name"], "data.streaming": True},
        {"data.train": [{"path": "a.jsonl", "template": "{b}"}], "data.eval": "b.jsonl", "data.template": "{a}"},
        {"train.batch_size": "auto", "train.step_rows": 64},
        {"teacher.cache": "auto", "teacher.dtype": "float16"},
        {"precision.initial_loss_scale": 2.0, "train.epochs": 2.0},
    ],
)
def test_a_setting_that_is_read_is_not_noted(settings: dict[str, Any]) -> None:
    assert not unread_notes(load_config(overrides=settings))


@pytest.mark.parametrize("name", preset_names())
def test_what_a_preset_sets_was_not_given(name: str) -> None:
    assert load_config(preset=name).given == frozenset()


def test_a_copy_and_a_longer_configuration_keep_what_was_given(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[train]\nstep_rows = 4\n[objectives.kd.weight]\nstart = 1\nend = 0.5\n")
    config = load_config(path, overrides={"train.seed": 1})
    assert config.given == {"train.step_rows", "objectives.kd.weight", "train.seed"}
    assert config == load_config(path, overrides={"train.seed": 1}).with_given(()), "who gave it changes no run"
    assert config.model_copy().given == config.given
    assert Config.model_validate(config.to_dict()).given == frozenset()


def test_the_note_is_in_the_log_of_a_run_from_python_and_from_a_file(world: Path, tmp_path: Path) -> None:
    over = tiny.settings(world, train__max_steps=1, eval__samples=0, train__step_rows=7)
    result = distill(load_config(overrides=over), tmp_path / "run", device="cpu")
    notes = [event["text"] for event in read_events(result.folder / "events.jsonl") if event["event"] == "note"]
    assert any(note.startswith("train.step_rows = 7 is not read") for note in notes)


def test_a_builtin_model_a_path_and_a_file_are_no_hub_ids(tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    assert is_hub_id("org/name") and is_hub_id("gpt2")
    assert not any(map(is_hub_id, ["builtin:teacher", "./a", "../a", "/a/b", "a/b/c", "s3://a/b", "a.gguf"]))
    assert not is_hub_id(str(tmp_path / "org"))


# -- what is missing ----------------------------------------------------------------------------------------

MINE = {"teacher.model": "./t", "student.model": "./s", "data.train": "d.jsonl"}


@pytest.mark.parametrize("missing", [*MINE, "all but teacher.model", "all but data.train"])
@pytest.mark.parametrize("preset", [None, "base"])
def test_once_a_part_is_the_users_own_a_missing_one_is_an_error(missing: str, preset: str | None) -> None:
    left = {key: MINE[key] for key in MINE if (key in missing) == missing.startswith("all but")}
    with pytest.raises(ConfigError) as caught:
        refuse_gaps(load_config(preset=preset, overrides=left))
    assert all(key in caught.value.where for key in MINE if key not in left)


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        (None, {}),
        (None, MINE),
        ("base", {"train.max_steps": 1}),
        ("demo", {"teacher.model": "./t"}),
        (None, {"teacher.model": "builtin:moe-teacher"}),
        (None, {**MINE, "student.model": "builtin:student"}),
        (None, {"teacher.model": "./t", "student.init": "shrink", "data.train": "d.jsonl"}),
        (None, {"student.model": "./s", "data.train": "d", "objectives.kd.weight": 0, "objectives.ce.weight": 1}),
    ],
)
def test_toys_alone_a_preset_that_names_them_and_a_whole_run_have_no_gap(
    preset: str | None, overrides: dict[str, Any]
) -> None:
    config = load_config(preset=preset, overrides=overrides)
    assert refuse_gaps(config) is None  # raises where there is a gap


def test_embedded_parts_that_nobody_named_are_noted(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(preset_text("base"))
    keys = ["teacher.model", "student.model", "data.train"]
    (note,) = embedded_notes(load_config(file))
    assert all(key in note for key in keys)
    (note,) = embedded_notes(load_config(file, overrides={"student.model": "builtin:student"}))
    assert [key in note for key in keys] == [True, False, True]
    assert not embedded_notes(load_config(preset="demo"))


def test_a_configuration_with_a_gap_is_refused_from_python_too(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[teacher]\nmodel = "./t"\n[data]\ntrain = "d.jsonl"\n')
    with pytest.raises(ConfigError) as caught:
        stillroom.distill(load_config(path), tmp_path / "run")
    assert "student.model" in caught.value.where
    with pytest.raises(ConfigError):
        stillroom.distill(preset="base", teacher="./t", student="./s", out=tmp_path / "run")


def test_the_table_is_read_without_torch() -> None:
    script = (
        "import sys; from stillroom.config.load import unread_notes; from stillroom.config import load_config; "
        "unread_notes(load_config(overrides={'train.step_rows': 3})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# -- types and bounds ---------------------------------------------------------------------------------------


def _numbers(schema: dict[str, Any], node: dict[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    if "$ref" in node:
        return _numbers(schema, schema["$defs"][node["$ref"].rpartition("/")[2]], key)
    found = [(key, node)] if node.get("type") in ("integer", "number") else []
    for branch in node.get("anyOf", []):
        found += _numbers(schema, branch, key)
    for name, below in node.get("properties", {}).items():
        found += _numbers(schema, below, f"{key}.{name}" if key else name)
    return found


def test_every_number_has_bounds() -> None:
    schema = Config.model_json_schema()
    numbers = _numbers(schema, schema, "")
    ramps = {key.rpartition(".")[0] for key, _node in numbers if key.endswith(".until")}
    for key, node in numbers:
        if key in ramps or key.rpartition(".")[0] in ramps:  # bounded by a validator of both ends
            with pytest.raises(ConfigError):
                load_config(overrides={key.removesuffix(".until"): 1e300})
            continue
        assert {"maximum", "exclusiveMaximum"} & set(node), key
        assert {"minimum", "exclusiveMinimum"} & set(node), key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.batch_size", 2**63),
        ("train.batch_size", 2**63 - 1),
        ("train.max_steps", 2**63),
        ("train.epochs", 1e300),
        ("train.peer_timeout_minutes", 1e300),
        ("objectives.kd.top_k", 2**70),
        ("objectives.kd.temperature", 1e300),
        ("objectives.kd.weight", {"start": 0, "end": 1e300}),
        ("train.learning_rate", 1e300),
        ("objectives.kd.top_k", {"start": 0, "end": 1e30}),
        ("data.max_length", 2**40),
        ("train.batch_size", True),
        ("train.max_steps", "10"),
        ("train.learning_rate", True),
        ("student.gradient_checkpointing", "false"),
        ("student.gradient_checkpointing", 1),
        ("data.bos", 1),
        ("objectives.kd.top_k", True),
        ("objectives.kd.top_k", "3"),
        ("objectives.kd.top_k", 2.9),
    ],
)
def test_a_number_out_of_all_bounds_or_of_another_type_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={key: value})
    assert key in caught.value.what


@pytest.mark.parametrize(
    "table",
    [
        {"use_curriculum": "false", "seed": 1},
        {"use_curriculum": 0, "seed": 1},
        {"kd_top_k": 2.9, "seed": 1},
        {"kd_top_k": "abc", "seed": 1},
        {"kd_top_k": None, "seed": 1},
        {"use_gradient_checkpointing": "false", "seed": 1},
        {"batch_size": True, "seed": 1},
        {"use_curriculum": True, "alpha_feature": 10**400, "seed": 1},
        {"use_curriculum": True, "alpha_kd": "x", "seed": 1},
    ],
    ids=lambda table: "-".join(map(str, next(iter(table.items()))))[:40],
)
def test_legacy_values_keep_their_types(tmp_path: Path, table: dict[str, Any]) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError):
        load(path)
