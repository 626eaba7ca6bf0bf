"""Laws of a plan for several processes: the whole in each with ddp, a part in each with fsdp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from stillroom.config import load_config
from stillroom.errors import ConfigError
from stillroom.planning.parts import Layout, lay_out
from stillroom.planning.plan import make_plan
from stillroom.planning.shapes import Shapes
from stillroom.planning.sharing import LEARNS
from stillroom.planning.target import find_target, with_processes


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations and no weights. The state of the student is most of what a process takes."""
    folder = tmp_path_factory.mktemp("shared shapes")
    tiny.config("llama", width=32, num_layers=1).save_pretrained(folder / "teacher")
    tiny.config("llama", width=256, num_layers=12).save_pretrained(folder / "student")
    return folder


def planned(world: Path, num_processes: int, strategy: str = "auto", mode: str = "fp32", **over: Any) -> Layout:
    target = with_processes(find_target("cpu"), num_processes, strategy)
    config = load_config(overrides=tiny.settings(world, train__batch_size=1, **over))
    return lay_out(config, Shapes(target), mode)


def test_a_process_of_ddp_holds_what_one_alone_holds_and_buckets(world: Path) -> None:
    alone, one_of_two = planned(world, 1), planned(world, 2, "ddp")
    count = alone.sizes.num_trained
    assert one_of_two.device["gradient buckets"] == 4 * count
    assert "gradients" not in one_of_two.device, "they are views of the buckets"
    for part in ("student weights", "moments"):
        assert one_of_two.device[part] == alone.device[part]
    assert one_of_two.host == alone.host


def test_a_process_of_fsdp_holds_its_part_and_what_is_gathered(world: Path) -> None:
    alone, parts = planned(world, 1), [planned(world, number, "fsdp") for number in (2, 4, 8)]
    for number, layout in zip((2, 4, 8), parts, strict=True):
        for part in ("student weights", "moments"):
            assert abs(layout.device[part] * number - alone.device[part]) < number
        assert abs(layout.host["snapshots"] * number - alone.host["snapshots"]) < number
    assert alone.total > parts[0].total > parts[1].total > parts[2].total
    assert parts[0].total < 0.6 * planned(world, 2, "ddp").total


def test_sharded_masters_and_a_sharded_base_are_counted_as_they_are_stored(world: Path) -> None:
    sharing = with_processes(find_target("cpu"), 2, "fsdp").sharing
    sizes = planned(world, 1).sizes
    count = sizes.num_trained
    plain = sharing.moment(LEARNS, {"student weights": 4 * count}, sizes, accumulates=False)
    held = {"student weights": 2 * count, "masters": 4 * count, "gradients": 2 * count}
    masters = sharing.moment(LEARNS, held, sizes, accumulates=False)
    assert masters["masters"] == masters["gradients"] == plain["student weights"] == 2 * count
    assert masters["student weights"] == 0 and masters["gathered weights"] * 2 == plain["gathered weights"]
    adapted = planned(world, 1, student__adapter__rank=2).sizes
    base = sharing.moment(LEARNS, {"student weights": adapted.frozen_bytes}, adapted, accumulates=False)
    assert 0 < base["gathered weights"] < 1.1 * plain["gathered weights"]
    assert 0 < base["gathered gradients"] < 0.1 * plain["gathered gradients"]


def test_a_plan_says_whose_bytes_it_counts_and_refuses_what_it_does_not_know(world: Path) -> None:
    config = load_config(overrides=tiny.settings(world))
    told = make_plan(config, with_processes(find_target("cpu"), 4, "fsdp"), is_quick=True).to_dict()
    assert (told["processes"], told["strategy"]) == (4, "fsdp")
    assert any("one of 4 processes with fsdp" in note for note in told["notes"])
    assert "fp16-master" in told["totals"] and "fp16-split" not in told["totals"]
    with pytest.raises(ConfigError, match="'zero' is no strategy"):
        with_processes(find_target("cpu"), 2, "zero")


def test_a_process_holds_its_part_of_a_sharded_teacher_and_what_is_outside_of_layers(tmp_path: Path) -> None:
    tiny.config("llama", width=256, num_layers=12).save_pretrained(tmp_path / "teacher")
    tiny.config("llama", width=32, num_layers=1).save_pretrained(tmp_path / "student")

    def laid_out(num_processes: int, strategy: str, placement: str) -> Layout:
        config = load_config(overrides=tiny.settings(tmp_path, train__batch_size=1, teacher__placement=placement))
        return lay_out(config, Shapes(with_processes(find_target("cpu"), num_processes, strategy)), "fp32")

    whole = laid_out(4, "ddp", "device")
    assert whole.teacher is not None
    size, layers = whole.teacher.parameters * 4, sorted(whole.teacher.layer_bytes)
    for strategy in ("ddp", "fsdp"):
        found = laid_out(4, strategy, "shard").device["teacher"]
        assert found == -(-size // 4) + size - sum(layers) + sum(layers[-2:])
        assert found < 0.6 * size
    assert laid_out(1, "auto", "shard").device["teacher"] == size
    config = load_config(overrides=tiny.settings(tmp_path, train__batch_size=1))
    target = with_processes(find_target("cpu"), 3, "ddp", teacher_ranks=1)
    asking = lay_out(config, Shapes(target), "fp32")
    assert asking.device["teacher"] == whole.teacher.vocabulary * whole.teacher.width * 4, "its head alone"
    assert target.sharing.num_processes == 2 and "1 of 3 processes hold the teacher" in target.sharing.notes[-1]


def test_groups_of_processes_each_hold_a_copy(world: Path) -> None:
    config = load_config(overrides=tiny.settings(world, train__batch_size=1))
    target = with_processes(find_target("cpu"), 4, "fsdp", 2)
    of_four, of_two = lay_out(config, Shapes(target), "fp32"), planned(world, 2, "fsdp")
    assert (of_four.device, of_four.host) == (of_two.device, of_two.host)
    assert "groups of 2 hold a copy each" in target.sharing.notes[0]
    with pytest.raises(ConfigError, match="4 processes cannot be divided into groups of 3"):
        with_processes(find_target("cpu"), 4, "fsdp", 3)
