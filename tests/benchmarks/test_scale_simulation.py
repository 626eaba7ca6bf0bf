"""Laws of the simulation of many cards, and that it gives what was measured and recorded."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "scale"))
import layer_time
import platforms
import rank_memory
import reproduce
import timeline
import wire
from transformers import AutoModelForCausalLM

from stillroom.training.trace import Sizes, sizes_of

FOLDER = Path(wire.__file__).parent
WEIGHTS = wire.Weights(2_000, (1_000,) * 6)
SIMULATED: dict[str, Any] = json.loads((FOLDER / "results" / "simulation.json").read_text())
NUMBERS = (2, 8, 64, 256, 1024)
T4 = platforms.PLATFORMS["T4"]


# -- bytes -----------------------------------------------------------------------------------------------


def test_a_ring_sends_what_no_algorithm_can_undercut() -> None:
    for number in NUMBERS:
        assert wire.Collective("all_reduce", 100.0, number).sent == pytest.approx(200 * (number - 1) / number)
        assert wire.Collective("all_gather", 100.0, number).sent == pytest.approx(100 * (number - 1) / number)
    assert wire.sent("ddp", WEIGHTS, wire.Mesh(4)) == pytest.approx(2 * 3 / 4 * 4 * WEIGHTS.whole)


def test_fsdp_gathers_layers_for_each_micro_batch_and_the_root_once() -> None:
    layers, root = sum(WEIGHTS.layers), WEIGHTS.root
    for number_of_micro in (1, 3):
        wanted = 4 * 3 / 4 * (3 * layers * number_of_micro + 2 * root)
        assert wire.sent("fsdp", WEIGHTS, wire.Mesh(4), number_of_micro) == pytest.approx(wanted)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_a_process_sends_more_the_more_processes_there_are(strategy: str) -> None:
    sent = [wire.sent(strategy, WEIGHTS, wire.Mesh(number)) for number in (1, *NUMBERS)]
    assert sent[0] == 0
    assert sent == sorted(sent)


@pytest.mark.parametrize("number", [64, 256, 1024])
def test_hsdp_sends_more_than_ddp_and_less_than_fsdp_and_least_between_nodes(number: int) -> None:
    mesh = wire.Mesh(number)
    ddp, fsdp, hsdp = (list(wire.window(name, WEIGHTS, mesh)) for name in ("ddp", "fsdp", "hsdp"))
    assert sum(c.sent for c in ddp) < sum(c.sent for c in hsdp) < sum(c.sent for c in fsdp)
    between = [sum(call.sent for call in calls if call.nodes > 1) for calls in (hsdp, ddp, fsdp)]
    assert between == sorted(between)
    assert between[0] < 0.2 * between[1]


def test_buckets_hold_every_gradient_once_and_the_first_is_small() -> None:
    weights = wire.Weights(10_000_000, (1_000_000,) * 30)
    found = wire.buckets(weights)
    assert sum(held for held, _layer in found) == 4 * weights.whole
    assert found[0][0] < found[1][0]
    assert [layer for _held, layer in found] == sorted((layer for _held, layer in found), reverse=True)


# -- time ------------------------------------------------------------------------------------------------


def call(size: float = 1e9, **options: Any) -> wire.Collective:
    return wire.Collective("all_gather", size, 8, **options)


def test_what_a_card_computes_meanwhile_hides_the_network() -> None:
    took = T4.seconds(call())
    slow = [timeline.Work(2 * took, call()) for _ in range(10)]
    played = timeline.play(slow, T4)
    assert played.exposed == pytest.approx(took), "only the first gather is waited for"
    assert played.overlap == pytest.approx(0.9)
    fast = timeline.play([replace(work, seconds=0.01 * took) for work in slow], T4)
    assert fast.seconds == pytest.approx(10 * took, rel=0.01)
    assert timeline.play(slow, T4, frozenset({"inside"})).exposed == 0


def test_a_gradient_is_sent_when_it_is_there_and_the_last_one_is_waited_for() -> None:
    took = T4.seconds(call())
    played = timeline.play([timeline.Work(5 * took, None, (call(),)) for _ in range(4)], T4)
    assert played.seconds == pytest.approx(21 * took)


def test_groups_with_one_process_in_a_node_share_its_network() -> None:
    alone = wire.Collective("all_reduce", 1e9, 16, 16)
    assert T4.rate(alone) == pytest.approx(T4.between * platforms.LINK_SHARE / 8)
    assert T4.rate(wire.Collective("all_reduce", 1e9, 128, 16)) <= T4.inside * platforms.LINK_SHARE


def test_a_tree_takes_over_where_a_ring_has_too_many_hops() -> None:
    small = wire.Collective("all_reduce", 4096.0, 1024, 128)
    snapshots = small.sent / T4.rate(small) + T4.latency(small)
    assert T4.seconds(small) < 0.2 * snapshots


# -- steps of a real pair ---------------------------------------------------------------------------------


def sizes(config: Any, dtype: torch.dtype) -> Sizes:
    with torch.device("meta"):
        return sizes_of(AutoModelForCausalLM.from_config(config, dtype=dtype))


@pytest.fixture(scope="module")
def pair() -> tuple[Sizes, Sizes]:
    found = rank_memory.pairs(2048)["135M <- 360M"]
    return sizes(found.student, torch.float32), sizes(found.teacher, torch.float16)


def job(row: dict[str, Any], pair: tuple[Sizes, Sizes]) -> timeline.Job:
    teacher = pair[1] if row["teacher"] in ("replicated", "sharded") else None
    shards = row["teacher"] == "sharded"
    return timeline.Job(
        pair[0],
        teacher,
        wire.Mesh(row["gpus"]),
        row["strategy"],
        shards,
        SIMULATED["tokens_per_step"],
        row["rows"],
        2048,
    )


def compute() -> layer_time.Compute:
    return layer_time.Compute(T4.card, layer_time.calibrated(), 2048)


ROWS = SIMULATED["pairs"]["135M <- 360M"]["cards"]["T4"]["rows"]


def test_the_committed_file_is_what_the_code_gives(pair: tuple[Sizes, Sizes]) -> None:
    card = compute()
    rows = [row for row in ROWS if row["fits"] and row["teacher"] in ("replicated", "sharded", "cached")]
    assert len(rows) > 30
    for row in rows:
        one = job(row, pair)
        played = timeline.step(one, card, T4)
        assert played.seconds == pytest.approx(row["seconds"], rel=1e-4), row
        assert timeline.bottleneck(one, card, T4)[0] == row["bottleneck"], row
        sent = row["gb_sent_inside"] + row["gb_sent_between"]
        assert sum(timeline.sent(one)) / 1e9 == pytest.approx(sent, rel=1e-4), row
        assert played.seconds >= max(played.computed, played.carried / 2)


def test_a_cached_teacher_costs_no_time_and_a_live_one_does(pair: tuple[Sizes, Sizes]) -> None:
    cached, live = (
        timeline.bottleneck(job({"gpus": 8, "strategy": "ddp", "teacher": name, "rows": 4}, pair), compute(), T4)[1]
        for name in ("cached", "replicated")
    )
    assert cached[timeline.TEACHER] == 0
    assert live[timeline.TEACHER] > 0.2


def test_more_cards_never_make_a_step_of_ddp_longer() -> None:
    for name in ("replicated", "cached"):
        seconds = [row["seconds"] for row in ROWS if row["teacher"] == name and row["strategy"] in ("single", "ddp")]
        assert seconds == sorted(seconds, reverse=True)


def test_no_teacher_is_cheaper_than_stored_answers_and_only_what_fits_is_timed() -> None:
    for pair in SIMULATED["pairs"].values():
        for card in pair["cards"].values():
            for number in (1, *NUMBERS):
                rows = [row for row in card["rows"] if row["gpus"] == number and row["fits"]]
                stored = [row["gpu_hours_per_billion"] for row in rows if row["teacher"] == "cached"]
                asked = [row["gpu_hours_per_billion"] for row in rows if row["teacher"] != "cached"]
                assert not asked or min(stored) < min(asked)
            assert all(("seconds" in row) == row["fits"] for row in card["rows"])


# -- memory ----------------------------------------------------------------------------------------------


def test_memory_of_a_process_falls_with_their_number_where_state_is_sharded(tmp_path: Path) -> None:
    config = rank_memory._llama(512, 3, 64, 128, 4, 2, is_tied=False)
    memory = rank_memory.Memory(rank_memory.Pair("tiny", config, config), "T4", tmp_path, length=64)

    def held(strategy: str, number: int, teacher: str = "cached") -> float:
        return memory.held(strategy, wire.Mesh(number), teacher, rows=1).total

    assert held("fsdp", 2) > held("fsdp", 8) > held("fsdp", 64) > held("fsdp", 1024)
    assert held("ddp", 2) == held("ddp", 1024) > held("hsdp", 64)
    assert held("hsdp", 64) == held("hsdp", 1024) == held("fsdp", 8)
    assert held("fsdp", 8) < held("fsdp", 8, "sharded") < held("fsdp", 8, "replicated")


# -- what was measured, and recorded ----------------------------------------------------------------------


def test_recorded_steps_come_out() -> None:
    rows = layer_time.reproduction(layer_time.calibrated())
    assert len(rows) == 6
    assert all(abs(row["over_recorded"] - 1) < 0.07 for row in rows), rows


def test_the_measured_bytes_are_those_of_the_laws() -> None:
    scale = json.loads((FOLDER / "results" / "scale.json").read_text())
    for one in reproduce.entries(scale):
        for name in ("ddp", "fsdp"):
            assert one["bytes_in_theory"][name] == pytest.approx(one["bytes_per_step"][name], rel=0.01)
    rows = reproduce.reproduced(scale)
    assert all(abs(row["bytes_over_measured"] - 1) < 0.01 for row in rows), rows
    assert all(abs(row["cpu_over_measured"] - 1) < 0.15 for row in rows), rows


def test_the_plan_says_what_a_process_takes() -> None:
    """Within 15 % of the peaks, with what libraries take beside tensors."""
    found = json.loads((FOLDER / "results" / "scale.json").read_text())["found"]
    rows = found.get("plan", {"rows": []})["rows"]
    assert all(abs(row["plan_and_libraries_over_peak"] - 1) < 0.15 for row in rows), rows


def test_cpu_is_that_of_processes_apart_and_of_every_collective() -> None:
    calls = [
        {"kind": kind, "size": size, "cpu_seconds": 1e-3 + 1e-9 * size}
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "copy")
        for size in (4096, 1 << 20, 1 << 24)
    ]
    one = {"apart": 10.0, "ddp": 10.0, "fsdp": 10.0, "one": 9.0}
    found = {"parameters": 3_000_000, "layers": [1_000_000] * 2, "cpu_seconds": [one], "gloo": []}
    found |= {"bytes_per_step": {"ddp": 24e6, "fsdp": 32e6}, "gloo": [{"processes": 2, "calls": calls}]}
    rows = {row["strategy"]: row for row in reproduce.reproduced({"found": found, "steps": 10})}
    assert rows["ddp"]["bytes"] == 24e6 and rows["fsdp"]["bytes"] == 32e6
    # one bucket after the small first one, and the small sums of a step: each a millisecond, and a nanosecond a byte
    small = reproduce.SMALL_SUMS * (1e-3 + 4096e-9)
    assert rows["ddp"]["cpu_seconds"] == pytest.approx(10 + 10 * (2e-3 + 12e-3 + small), rel=1e-6)
    assert rows["fsdp"]["cpu_seconds"] > rows["ddp"]["cpu_seconds"]
    assert reproduce.reproduced({"found": {"parameters": 1}}) == []
