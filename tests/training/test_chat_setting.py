"""Records of a prompt and an answer: a run continues with the text that it began with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from trl_templates import template

from stillroom.config import load_config
from stillroom.core.errors import DataError, Interrupted
from stillroom.training.distill import distill, resume
from stillroom.training.loop import Stop
from stillroom.training.run_folder import read_config
from stillroom.training.write_cache import make_cache


@pytest.fixture
def asked_world(world: Path, tmp_path: Path) -> Path:
    """Models with a chat template, and prompts with answers."""
    home = Path(shutil.copytree(world, tmp_path / "world"))
    words = tiny.tokenizer()
    words.chat_template = template("phi3")
    for name in ("teacher", "student"):
        words.save_pretrained(home / name)
    pairs = [{"prompt": line[:9], "completion": line} for line in tiny.sentences(60, 0)]
    (home / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    return home


def config(home: Path, **over: Any) -> Any:
    wanted = {"train__max_steps": 4, "data__max_length": 96, "eval__samples": 0, **over}
    return load_config(overrides=tiny.settings(home, **wanted))


def stopped(chosen: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        wanted = iter([False, True])
        patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, False))
        with pytest.raises(Interrupted):
            distill(chosen, folder, device="cpu")


def test_a_run_of_raw_pairs_that_began_before_the_setting_is_continued_raw(
    asked_world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    stopped(config(asked_world, data__chat="off"), run, monkeypatch)
    stored = json.loads((run / "config.json").read_text())
    for name in ("chat", "thoughts", "on_long"):
        del stored["config"]["data"][name]
    (run / "config.json").write_text(json.dumps(stored))
    assert read_config(run).data.chat == "off"
    stopped(config(asked_world), run, monkeypatch)  # the same command, which does not name the setting
    assert resume(run, device="cpu").summary["status"] == "done"


def test_a_cache_of_raw_pairs_is_refused_with_the_setting(asked_world: Path, tmp_path: Path) -> None:
    make_cache(config(asked_world, data__chat="off"), tmp_path / "cache", device="cpu")
    cache = str(tmp_path / "cache")
    with pytest.raises(DataError) as caught:
        distill(config(asked_world, teacher__cache=cache), tmp_path / "a", device="cpu")
    assert any("data.chat" in advice for advice in caught.value.advice)
    kept = distill(config(asked_world, teacher__cache=cache, data__chat="off"), tmp_path / "b", device="cpu")
    assert kept.summary["status"] == "done"
