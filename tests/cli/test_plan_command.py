"""`stillroom plan`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
import tiny

from stillroom.config import load_config, parse_assignments


@pytest.fixture
def world(tmp_path: Path) -> Path:
    folder = tmp_path / "world"
    tiny.save_model(folder / "teacher", num_layers=3)
    tiny.save_model(folder / "student", num_layers=2)
    tiny.save_text(folder / "train.jsonl")
    return folder


def words(world: Path, *more: str) -> list[str]:
    settings = tiny.settings(world).items()
    return ["plan", *(word for key, value in settings for word in ("--set", f"{key}={value}")), *more]


def test_a_plan_is_80_columns_wide_and_says_that_it_fits(stillroom: commands.Command, world: Path) -> None:
    code, out, err = stillroom(*words(world, "--device", "cpu"))
    assert code == 0, err
    for word in ("activations", "moments", "checkpoints", "fp16-split", "fits: ", "ratio", "passes over the data"):
        assert word in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_the_amounts_of_a_plan_stand_in_one_column(stillroom: commands.Command, world: Path) -> None:
    _code, out, err = stillroom(*words(world, "--device", "cpu", "--quick"))
    parts = out[out.index("at the peak (") : out.index("total in each precision")].splitlines()[1:]
    rows = [row for row in parts if row.startswith("  ")]
    assert any("student weights" in row for row in rows) and len({len(row) for row in rows}) == 1, err


def test_what_the_process_takes_in_all_is_no_part_of_the_plan(stillroom: commands.Command, world: Path) -> None:
    _code, out, err = stillroom(*words(world, "--device", "cpu", "--quick"))
    parts, _, verdict = out.partition("fits: ")
    assert "the process" not in parts and "the process" in verdict, err


def test_json_has_the_same_keys_whether_it_fits_or_not(stillroom: commands.Command, world: Path) -> None:
    plans = []
    for memory, code in (("10GB", 0), ("10kB", 2)):
        ended, out, err = stillroom(*words(world, "--device", "cpu", "--quick", "--json", "--device-memory", memory))
        assert ended == code, err
        plans.append(json.loads(out))
    assert list(plans[0]) == list(plans[1])
    assert [plan["fits"] for plan in plans] == [True, False]
    assert plans[1]["short_by"] == plans[1]["fitted"]["total"] - 10_000 > 0
    assert sum(plans[0]["plan"]["device"].values()) == max(plans[0]["plan"]["moments"].values())


def test_the_written_configuration_is_accepted_by_distill(stillroom: commands.Command, world: Path) -> None:
    _code, out, _err = stillroom(*words(world, "--device", "cpu", "--quick", "--json"))
    bound = int(0.8 * json.loads(out)["plan"]["total"])
    code, out, err = stillroom(
        *words(world, "--device", "cpu", "--quick", "--device-memory", f"{bound}B", "--write", "fitted.toml")
    )
    assert code == 0, err
    assert "with these it fits" in out
    train = load_config("fitted.toml").train
    assert train.rows_per_batch < 4 == train.rows_per_batch * train.gradient_accumulation_steps
    code, _out, err = stillroom(
        "distill", "fitted.toml", "--out", "run", "--device", "cpu", "--no-progress", "--set", "train.max_steps=2"
    )
    assert code in (0, 22), err  # two steps need not make a better student
    assert Path("run/summary.json").is_file()


def test_where_nothing_helps_all_changes_are_proposed_and_nothing_is_written(
    stillroom: commands.Command, world: Path
) -> None:
    code, out, _err = stillroom(
        *words(world, "--device", "cpu", "--quick", "--device-memory", "10kB", "--write", "fitted.toml")
    )
    assert code == 2
    assert not Path("fitted.toml").exists()
    proposed = dict(word.split("=", 1) for word in re.findall(r"--set (\S+)", out))
    assert {"train.batch_size", "student.adapter.rank"} <= set(proposed)
    load_config(overrides=parse_assignments([f"{key}={value}" for key, value in proposed.items()]))


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--device-memory", "16XB"], 2, "not a memory size"),
        (["--card", "Z9"], 2, "T4"),
        (["--gpu", "Z9"], 2, "T4"),
        (["no-such-file.toml"], 2, "no-such-file.toml"),
        (["--set", "student.model=./nowhere"], 20, "nowhere"),
        (["--set", "student.model=./hollow"], 20, "config.json"),
        (["--set", "train.batch_sise=3"], 2, "batch_size"),
    ],
)
def test_bad_input_is_named(stillroom: commands.Command, world: Path, more: list[str], code: int, said: str) -> None:
    Path("hollow").mkdir()
    ended, _out, err = stillroom(*words(world, "--quick", "--device", "cpu", *more))
    assert ended == code, err
    assert said in err


def test_a_gpu_has_two_names_and_a_disk_that_is_too_small_is_said(
    stillroom: commands.Command, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [json.loads(stillroom(*words(world, "--quick", name, "T4", "--json"))[1]) for name in ("--gpu", "--card")]
    assert plans[0]["plan"] == plans[1]["plan"] and plans[0]["bound"] == int(14.56 * 2**30)
    assert plans[0]["disk_short_by"] == 0 < plans[0]["disk_free"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1_000, total=10**9))
    needed = sum(plans[0]["plan"]["disk"].values())
    short = json.loads(stillroom(*words(world, "--quick", "--gpu", "T4", "--json"))[1])
    assert short["disk_short_by"] == needed - 1_000
    assert "checkpoint.keep=1" in stillroom(*words(world, "--quick", "--gpu", "T4"))[1]


def test_a_probe_measures_a_step_here(stillroom: commands.Command, world: Path) -> None:
    code, out, err = stillroom(*words(world, "--device", "cpu", "--quick", "--probe", "--json"))
    assert code == 0, err
    cost = json.loads(out)["cost"]
    assert cost["seconds_per_step"] > 0
    assert "measured" in cost["seconds_from"]
