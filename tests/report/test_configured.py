"""Laws of what the page says of a configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stillroom.config import load_config, preset_names
from stillroom.report.history import History, RunRecord
from stillroom.report.page import MAX_CONFIG_CHARACTERS, again, nearest_preset, preset, render


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_nearest_to_itself(name: str) -> None:
    found, rows = nearest_preset(load_config(preset=name).to_dict())
    assert rows == []
    assert load_config(preset=found).to_dict() == load_config(preset=name).to_dict()


def test_what_differs_from_the_preset_is_listed_with_both_values() -> None:
    config = load_config(preset="demo", overrides={"train.learning_rate": 0.125, "train.seed": 99}).to_dict()
    found, rows = nearest_preset(config)
    assert found == "demo"
    assert {key: here for key, _, here in rows} == {"train.learning_rate": 0.125, "train.seed": 99}
    part = preset(RunRecord("run", config))
    assert part is not None and part["heads"][1:] == ["preset demo", "this run"]
    assert {key: here for key, (_, here) in part["rows"]} == {"train.learning_rate": "0.125", "train.seed": "99"}


def test_the_configuration_of_a_folder_can_be_run_again(tmp_path: Path) -> None:
    """What the page's commands write is a file that `distill` reads as the same configuration."""
    config = load_config(preset="demo", overrides={"train.seed": 7})
    path = tmp_path / "again.json"
    path.write_text(json.dumps(config.to_dict()))
    assert load_config(path) == config


def test_a_run_without_a_start_does_not_say_how_to_run_it_again() -> None:
    assert again(RunRecord("run", {"train": {}})) is None


def test_each_command_stands_on_a_line_of_its_own() -> None:
    start = {"event": "run_start", "versions": {"stillroom": "0.1.0", "torch": "2.13.0+cpu"}}
    page = render(RunRecord("run", {"train": {}}, History.of([start])))
    (commands,) = re.findall(r'<pre class="commands">(.*?)</pre>', page, flags=re.DOTALL)
    lines = commands.split("\n")
    assert lines[0] == "pip install torch==2.13.0" and lines[2].startswith("stillroom distill")


def test_a_configuration_that_is_cut_says_so() -> None:
    start = {"event": "run_start"}
    part = again(RunRecord("run", {"data": {"train": "x" * MAX_CONFIG_CHARACTERS}}, History.of([start])))
    assert part is not None and part["config"].endswith("config.json")
