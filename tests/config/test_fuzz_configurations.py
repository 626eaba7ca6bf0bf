"""Configurations drawn at random end in documented exit codes, never in a traceback or a fault of ours."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import tiny

from stillroom.cli import main
from stillroom.config import load, preset_names
from stillroom.config.load import all_keys, toml_lines
from stillroom.config.schema import Config

NUM_CASES, NUM_BATCHES = 500, 20
DOCUMENTED = {0, 2, 20, 21, 22, 23, 24, 25, 75}
SCHEMA = Config.model_json_schema()
HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3.5, 1e300, -1e300, 1e-300, math.nan, math.inf, 2**31, 2**63 - 1, 2**63, 10**30,
    "", "abc", "none", "auto", "\x00", "\u202e", "a" * 5000, "../..", "~nobody/x", "hf:", "hf::::", "builtin:", "*",
    "http://", "http://[", "s3://", [], [1], [[]], [["a", 1]], ["a", 2], {}, {"start": 1, "end": 0}, {"start": "x"},
    {"a": {"b": {"c": 1}}}, {"path": ""}, [{"path": "x", "weight": -1}], [{"nosuch": 1}], {"prompt": ""},
]  # fmt: skip
# What a drawn run must not do: train for long, compile, wait for servers, or ask a hub.
_SHORT = {
    "train.max_steps": 1,
    "train.compile": "off",
    "eval.samples": 0,
    "eval.max_batches": 2,
    "train.eval_steps": 0,
    "teacher.server": None,
    "telemetry.tracker": "none",
}


def _node(key: str) -> dict[str, Any]:
    """The JSON schema of a setting; empty where it cannot be told."""
    node: dict[str, Any] = SCHEMA
    for part in key.split("."):
        node = node.get("properties", {}).get(part, {})
        while "$ref" in node or "anyOf" in node or "allOf" in node:
            branch = node if "$ref" in node else (node.get("anyOf") or node["allOf"])[0]
            if "$ref" not in branch:
                node = branch
                break
            node = SCHEMA["$defs"][branch["$ref"].rpartition("/")[2]]
    return node


def _likely(rng: random.Random, key: str) -> Any:
    """A value of the right type, most often within its bounds."""
    node = _node(key)
    if "enum" in node:
        return rng.choice(node["enum"])
    if "const" in node:
        return node["const"]
    least = node.get("minimum", node.get("exclusiveMinimum", 0))
    match node.get("type"):
        case "boolean":
            return rng.random() < 0.5
        case "integer":
            return least + rng.choice([0, 1, 2, 7, 30])
        case "number":
            return least + rng.choice([0.0, 0.01, 0.5, 1.0, 2.0])
        case "string":
            return rng.choice(["abc", "./nowhere", "builtin:teacher", "builtin:student", "builtin:qa"])
        case "array":
            return rng.choice([[], ["a*"], ["abc", "b"]])
    return rng.choice(HOSTILE)


def _settings(rng: random.Random) -> dict[str, Any]:
    keys = list(all_keys())
    drawn = {}
    for key in rng.sample(keys, rng.randint(1, 4)):
        drawn[key] = _likely(rng, key) if rng.random() < 0.92 else rng.choice(HOSTILE)
    if rng.random() < 0.06:  # a key that is not there, or a section in place of a value
        key = rng.choice(keys)
        drawn[rng.choice([f"{key}.more", key.rpartition(".")[0], key + "x", "training.lr", "lr"])] = rng.choice(HOSTILE)
    return drawn


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in settings.items():
        below = table
        *folders, last = key.split(".")
        for folder in folders:
            below = below.setdefault(folder, {})
            if not isinstance(below, dict):
                break
        else:
            below[last] = value
    return table


def _legacy(rng: random.Random) -> dict[str, Any]:
    known = [*load._DIRECT, *load._TRANSLATED, *load._IGNORED, "use_curriculum"]
    ours = {key: _likely(rng, load._DIRECT[key]) for key in rng.sample(list(load._DIRECT), 3)}
    others = {key: rng.choice([*HOSTILE, 1, 2, 0.5]) for key in rng.sample(known, rng.randint(0, 2))}
    return {**ours, **others} if rng.random() < 0.7 else {**others, **ours}


def _words(rng: random.Random, world: Path, folder: Path) -> list[str]:
    """The words of a drawn command."""
    base = tiny.settings(world, **{key.replace(".", "__"): value for key, value in _SHORT.items()})
    drawn = _settings(rng)
    route = rng.choice(["set", "json", "toml", "legacy"])
    words: list[str] = []
    over = dict(base)
    if route == "set":
        over |= drawn if rng.random() < 0.8 else {}
        words += [word for key, value in drawn.items() for word in ("--set", f"{key}={_word(value)}")]
    else:
        path = folder / ("run.toml" if route == "toml" else "run.json")
        table = _legacy(rng) if route == "legacy" else _nested(drawn)
        if rng.random() < 0.1:
            table["preset"] = rng.choice([*preset_names(), ""])
        path.write_text("\n".join(toml_lines(table)) if route == "toml" else json.dumps(table), encoding="utf-8")
        words.append(str(path))
        over = {key: value for key, value in base.items() if key in _SHORT or key not in drawn}
    if rng.random() < 0.15:
        words += ["--preset", rng.choice(preset_names())]
    command = "distill" if rng.random() < 0.3 else "plan"
    if command == "distill":
        over |= _SHORT
        words += ["--out", str(folder / "out"), "--no-progress", *(["--strict"] if rng.random() < 0.2 else [])]
    else:
        over = {key: value for key, value in over.items() if key not in drawn}
        words.append("--quick")
    given = [word for key, value in over.items() for word in ("--set", f"{key}={_word(value)}")]
    return [command, *words, "--device", "cpu", *given]


def _word(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    return next(iter(toml_lines({"x": [value]}))).removeprefix("x = [").removesuffix("]")


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_drawn_configurations_end_in_documented_codes(
    batch: int,
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    wrong: list[str] = []
    for number in range(batch, NUM_CASES, NUM_BATCHES):
        rng = random.Random(number)
        folder = tmp_path / str(number)
        folder.mkdir()
        words = _words(rng, world, folder)
        capsys.readouterr()
        try:
            main(words)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        if code not in DOCUMENTED or "Traceback" in captured.out + captured.err:
            wrong.append(f"case {number}: {words}\nended with {code}:\n{captured.err[-2000:]}")
    assert not wrong, "\n\n".join(wrong)
