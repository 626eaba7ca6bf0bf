"""Laws of the model of memory: sums of parts, one of several processes, micro-batches that fit; and of freed memory."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
import torch

from stillroom.config import load_config
from stillroom.core.errors import ConfigError
from stillroom.doctor.plan.plan import find_target, make_plan, with_processes
from stillroom.precision.gpus import find_gpu
from stillroom.precision.policy import POLICIES
from stillroom.teachers.placement import pinned_bytes
from stillroom.training.memory import (
    AIM,
    LEARNS,
    LIBRARIES,
    Layout,
    Shapes,
    auto_parts,
    chosen_mode,
    lay_out,
    parts_that_fit,
    trim_heap,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with configurations and no weights: nothing else is read."""
    folder = tmp_path_factory.mktemp("shapes")
    tiny.config("llama", width=64, num_layers=6).save_pretrained(folder / "teacher")
    tiny.config("llama", width=64, num_layers=4).save_pretrained(folder / "student")
    return folder


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    return Shapes(find_target("cpu"))


def laid_out(world: Path, shapes: Shapes, mode: str = "fp32", **over: Any) -> Layout:
    return lay_out(load_config(overrides=tiny.settings(world, **over)), shapes, mode)


def test_the_parts_add_up_to_the_largest_moment(world: Path, shapes: Shapes) -> None:
    layout = laid_out(world, shapes)
    assert sum(layout.device.values()) == max(layout.moments.values()) == layout.moments[layout.moment]
    assert layout.total == sum(layout.device.values()) + sum(layout.host.values())  # on a CPU both are main memory
    assert layout.process == layout.total + LIBRARIES, "what the system says of the process has the libraries in it"


def test_weights_and_moments_are_those_of_every_parameter(world: Path, shapes: Shapes) -> None:
    layout = laid_out(world, shapes)
    count = layout.sizes.parameters
    assert layout.device["student weights"] == 4 * count
    assert layout.device["moments"] == 8 * count
    assert layout.teacher is not None
    assert layout.device["teacher"] == 4 * layout.teacher.parameters


def test_int8_and_muon_shrink_the_moments_and_what_is_kept_of_them(world: Path, shapes: Shapes) -> None:
    whole = laid_out(world, shapes)
    count, hidden = whole.sizes.num_trained, whole.sizes.hidden
    coded, muon, both = (
        laid_out(world, shapes, **over)
        for over in (
            {"precision__moments": "int8"},
            {"train__optimizer": "muon"},
            {"precision__moments": "int8", "train__optimizer": "muon"},
        )
    )
    assert coded.device["moments"] == 2 * count
    assert muon.device["moments"] == 8 * count - 4 * hidden and 0.5 * count < hidden < count
    assert both.device["moments"] == 2 * count - hidden
    for layout in (coded, muon, both):
        saved = whole.device["moments"] - layout.device["moments"]
        assert whole.host["copy to save"] - layout.host["copy to save"] == saved
        assert whole.disk["checkpoints"] - layout.disk["checkpoints"] == saved * (
            whole.disk["checkpoints"] // (16 * count)
        )


def test_more_rows_keep_more_activations(world: Path, shapes: Shapes) -> None:
    one, four = (laid_out(world, shapes, train__batch_size=rows).trace.kept for rows in (2, 8))
    assert 3.5 * one < four < 4.1 * one


def test_checkpointing_keeps_less_than_half_of_the_activations(world: Path, shapes: Shapes) -> None:
    whole = laid_out(world, shapes, train__batch_size=16)
    less = laid_out(world, shapes, train__batch_size=16, student__gradient_checkpointing=True)
    assert less.trace.kept < 0.5 * whole.trace.kept
    assert less.total < whole.total


def test_an_adapter_shrinks_the_state(world: Path, shapes: Shapes) -> None:
    whole, adapted = laid_out(world, shapes), laid_out(world, shapes, student__adapter={"rank": 2})
    assert adapted.sizes.num_trained < 0.2 * whole.sizes.num_trained
    assert adapted.device["moments"] == 8 * adapted.sizes.num_trained
    assert adapted.disk["checkpoints"] < 0.2 * whole.disk["checkpoints"]


def test_stored_answers_leave_no_teacher_on_the_device(world: Path, shapes: Shapes) -> None:
    cached = laid_out(world, shapes, teacher__cache="answers")
    assert "teacher" not in cached.device
    assert "teacher answers" not in cached.moments


def test_a_streamed_teacher_is_there_two_layers_at_a_time(world: Path, shapes: Shapes) -> None:
    whole, streamed = laid_out(world, shapes), laid_out(world, shapes, teacher__placement="stream")
    assert streamed.moments["teacher answers"] < whole.moments["teacher answers"]
    assert streamed.total < whole.total


def test_an_offloaded_teacher_is_in_the_main_memory_of_a_card(world: Path) -> None:
    card = Shapes(find_target(gpu=find_gpu("T4")))
    whole, away = laid_out(world, card), laid_out(world, card, teacher__placement="offload")
    teacher = whole.moments["update"] - away.moments["update"] + 2 * 320 * 64
    assert away.teacher is not None
    assert teacher <= away.host["teacher"] == pinned_bytes(away.teacher.tensor_bytes), "as the allocator rounds it"
    assert away.moments["student learns"] < whole.moments["student learns"]


@pytest.mark.parametrize("mode", sorted(POLICIES))
def test_every_precision_has_a_layout(world: Path, shapes: Shapes, mode: str) -> None:
    layout = laid_out(world, shapes, mode)
    has_extra = bool({"masters", "residuals"} & set(layout.device))
    assert has_extra == POLICIES[mode].keeps_half_weights
    assert layout.device["student weights"] == (2 if has_extra else 4) * layout.sizes.parameters


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma2", "granite", "mixtral"])
def test_families_are_followed_or_said_to_be_estimated(tmp_path: Path, family: str) -> None:
    for role in ("teacher", "student"):
        tiny.config(family).save_pretrained(tmp_path / role)
    shapes = Shapes(find_target("cpu"))
    layout = laid_out(tmp_path, shapes)
    assert layout.device["activations"] > 0
    is_estimated = any("estimated" in note for note in shapes.notes)
    assert is_estimated <= (family == "mixtral")


def test_a_cut_student_has_the_teachers_layers_that_are_kept(world: Path, shapes: Shapes) -> None:
    layout = laid_out(world, shapes, student__init="shrink", student__shrink={"layers": 2})
    assert layout.teacher is not None
    assert (layout.sizes.layers, layout.teacher.layers) == (2, 6)


def test_auto_chooses_as_the_run_would(world: Path) -> None:
    config = load_config(overrides=tiny.settings(world))
    chosen = {card: chosen_mode(config, Shapes(find_target(gpu=find_gpu(card))))[0] for card in ("T4", "P100", "A100")}
    assert chosen == {"T4": "fp16-master", "P100": "fp32", "A100": "bf16-mixed"}


# ---- Micro-batches that fit


def test_auto_takes_the_largest_micro_batches_that_fit(world: Path, shapes: Shapes) -> None:
    config = load_config(overrides=tiny.settings(world, train__batch_size="auto", train__step_rows=64))
    assert auto_parts(config, shapes, "fp32") == 8, "larger than eight rows are no faster on a CPU"
    assert lay_out(config, shapes, "fp32").rows == 8
    for parts in (8, 16, 64):
        total = lay_out(config, shapes, "fp32", rows=64 // parts).total
        small = Shapes(replace(shapes.target, bound=int(total / AIM) + 1))
        assert auto_parts(config, small, "fp32") == parts
        assert lay_out(config, small, "fp32").total == total


def test_a_batch_is_cut_no_further_than_to_single_rows(world: Path, shapes: Shapes) -> None:
    config = load_config(overrides=tiny.settings(world, train__batch_size=6))
    assert parts_that_fit(config, shapes, "fp32") == 1
    assert parts_that_fit(config, Shapes(replace(shapes.target, bound=1)), "fp32") == 8
    assert parts_that_fit(config, shapes, "fp32", least=4) == 4


def test_a_batch_in_parts_takes_what_accumulated_micro_batches_take(world: Path, shapes: Shapes) -> None:
    whole = load_config(overrides=tiny.settings(world, train__batch_size=8))
    parts = load_config(overrides=tiny.settings(world, train__batch_size=2, train__gradient_accumulation_steps=4))
    assert lay_out(whole, shapes, "fp16-master", rows=2) == lay_out(parts, shapes, "fp16-master")


# ---- One of several processes: the whole in each with ddp, a part in each with fsdp


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations and no weights. The state of the student is most of what a process takes."""
    folder = tmp_path_factory.mktemp("shared shapes")
    tiny.config("llama", width=32, num_layers=1).save_pretrained(folder / "teacher")
    tiny.config("llama", width=256, num_layers=12).save_pretrained(folder / "student")
    return folder


def planned(shared_world: Path, num_processes: int, strategy: str = "auto", mode: str = "fp32", **over: Any) -> Layout:
    target = with_processes(find_target("cpu"), num_processes, strategy)
    config = load_config(overrides=tiny.settings(shared_world, train__batch_size=1, **over))
    return lay_out(config, Shapes(target), mode)


def test_a_process_of_ddp_holds_what_one_alone_holds_and_buckets(shared_world: Path) -> None:
    alone, one_of_two = planned(shared_world, 1), planned(shared_world, 2, "ddp")
    count = alone.sizes.num_trained
    assert one_of_two.device["gradient buckets"] == 4 * count
    assert "gradients" not in one_of_two.device, "they are views of the buckets"
    for part in ("student weights", "moments"):
        assert one_of_two.device[part] == alone.device[part]
    assert one_of_two.host == alone.host


def test_a_process_of_fsdp_holds_its_part_and_what_is_gathered(shared_world: Path) -> None:
    alone, parts = planned(shared_world, 1), [planned(shared_world, number, "fsdp") for number in (2, 4, 8)]
    for number, layout in zip((2, 4, 8), parts, strict=True):
        for part in ("student weights", "moments"):
            assert abs(layout.device[part] * number - alone.device[part]) < number
        assert abs(layout.host["snapshots"] * number - alone.host["snapshots"]) < number
    assert alone.total > parts[0].total > parts[1].total > parts[2].total
    assert parts[0].total < 0.6 * planned(shared_world, 2, "ddp").total


def test_sharded_masters_and_a_sharded_base_are_counted_as_they_are_stored(shared_world: Path) -> None:
    sharing = with_processes(find_target("cpu"), 2, "fsdp").sharing
    sizes = planned(shared_world, 1).sizes
    count = sizes.num_trained
    plain = sharing.moment(LEARNS, {"student weights": 4 * count}, sizes, accumulates=False)
    held = {"student weights": 2 * count, "masters": 4 * count, "gradients": 2 * count}
    masters = sharing.moment(LEARNS, held, sizes, accumulates=False)
    assert masters["masters"] == masters["gradients"] == plain["student weights"] == 2 * count
    assert masters["student weights"] == 0 and masters["gathered weights"] * 2 == plain["gathered weights"]
    adapted = planned(shared_world, 1, student__adapter__rank=2).sizes
    base = sharing.moment(LEARNS, {"student weights": adapted.frozen_bytes}, adapted, accumulates=False)
    assert 0 < base["gathered weights"] < 1.1 * plain["gathered weights"]
    assert 0 < base["gathered gradients"] < 0.1 * plain["gathered gradients"]


def test_a_plan_says_whose_bytes_it_counts_and_refuses_what_it_does_not_know(shared_world: Path) -> None:
    config = load_config(overrides=tiny.settings(shared_world))
    told = make_plan(config, with_processes(find_target("cpu"), 4, "fsdp"), is_quick=True).to_dict()
    assert (told["processes"], told["strategy"]) == (4, "fsdp")
    assert set(with_processes(find_target("cpu"), 4, "fsdp").sharing.notes) <= set(told["notes"])
    assert "fp16-master" in told["totals"] and "fp16-split" not in told["totals"]
    with pytest.raises(ConfigError) as caught:
        with_processes(find_target("cpu"), 2, "zero")
    assert caught.value.where == "--strategy"


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


def test_groups_of_processes_each_hold_a_copy(shared_world: Path) -> None:
    config = load_config(overrides=tiny.settings(shared_world, train__batch_size=1))
    target = with_processes(find_target("cpu"), 4, "fsdp", 2)
    of_four, of_two = lay_out(config, Shapes(target), "fp32"), planned(shared_world, 2, "fsdp")
    assert (of_four.device, of_four.host) == (of_two.device, of_two.host)
    with pytest.raises(ConfigError) as caught:
        with_processes(find_target("cpu"), 4, "fsdp", 3)
    assert caught.value.where == "train.shard_size"


@pytest.mark.parametrize(("divergence", "blocks"), [("forward_kl", 0), ("reverse_kl", 1), ("jsd", 2)])
def test_a_card_is_planned_with_the_temporaries_of_its_fused_rows(world: Path, divergence: str, blocks: int) -> None:
    card = Shapes(find_target(gpu=find_gpu("T4")))
    settings = {"objectives__chunk_tokens": 8, "objectives__kd__divergence": divergence}
    plain = laid_out(world, card, objectives__chunk_tokens=8).trace.at_peak["head"]
    assert laid_out(world, card, **settings).trace.at_peak["head"] - plain == blocks * 4 * 8 * 320


# -- freed memory ----------------------------------------------------------------------------------------


def test_what_is_freed_between_blocks_that_stay_is_returned() -> None:
    """A real model's process grew with its steps: glibc gives back what lies at the end of its heap alone."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("another C library")
    process = psutil.Process()
    taken = [torch.ones(16_000 if number % 2 else 16) for number in range(4_000)]  # of 64 kB: not mapped one by one
    kept = taken[::2]
    del taken
    before = process.memory_info().rss
    trim_heap()
    assert before - process.memory_info().rss > 60e6 and len(kept) == 2_000
