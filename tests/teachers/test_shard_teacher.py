"""Laws of a sharded teacher: what does not work with it is refused by name, and one process holds it whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from process_jobs import losses
from refusals import refused

from stillroom.config import load_config
from stillroom.core.errors import ConfigError
from stillroom.models.anatomy import layers_if_any
from stillroom.parallel import Parallel
from stillroom.parallel.base import Processes
from stillroom.teachers.placement import shard_teacher
from stillroom.telemetry import read_events
from stillroom.training.distill import distill
from stillroom.training.models import load_models

SHARD = {"teacher.placement": "shard"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gates": ({"teacher.router.mode": "sar"}, "teacher.router.mode sar needs"),
    "quantised": ({"teacher.quantisation": "int8"}, "a quantised teacher stays on the device"),
    "served": ({"teacher.server": "http://localhost:1"}, "teacher.placement is for weights on this machine"),
    "cached": ({"teacher.cache": "auto"}, "leave teacher.cache out"),
    "few tokens": ({"teacher.signal.kind": "top_k"}, "asks row by row"),
    "labels alone": (
        {"data.train": [{"path": "a.jsonl"}, {"path": "b.jsonl", "objectives": "labels"}]},
        "objectives = 'labels'",
    ),
    "gradients of terms": ({"telemetry.gradient_steps": 1}, "telemetry.gradient_steps asks the teacher"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_sharded_teacher_refuses_by_name(name: str) -> None:
    over, words = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=SHARD | over)
    assert words in str(caught.value)


def test_a_batch_size_found_by_trial_is_refused_on_a_card(world: Path) -> None:
    config = load_config(overrides={**tiny.settings(world), **SHARD, "train.batch_size": "auto"})
    loaded = load_models(config, torch.device("cpu")).loaded_teacher
    several = Processes.__new__(Processes)
    with refused(ConfigError, "train.batch_size", "'auto'"):
        shard_teacher(config, loaded, several, torch.device("cuda"), tell=lambda _text: None)


def test_one_process_holds_the_whole_teacher_and_says_so(world: Path, tmp_path: Path) -> None:
    over = {**tiny.settings(world), "train.max_steps": 2}
    for name, more in (("plain", {}), ("shard", SHARD)):
        distill(load_config(overrides=over | more), tmp_path / name, device="cpu")
    assert losses(tmp_path / "plain") == losses(tmp_path / "shard")
    notes = [event["text"] for event in read_events(tmp_path / "shard" / "events.jsonl") if event["event"] == "note"]
    assert any("teacher.placement = 'shard' has no effect" in text for text in notes)


class Two(Parallel):
    size = 2


def test_a_process_reads_one_layer_at_a_time_of_what_it_keeps_a_part_of(world: Path) -> None:
    def opened(**over: Any) -> Any:
        config = load_config(overrides={**tiny.settings(world), **SHARD, **over})
        return load_models(config, torch.device("cpu"), parallel=Two()).loaded_teacher

    found = opened()
    layers = [one for layer in layers_if_any(found.network) for one in layer.parameters()]
    assert layers and all(one.is_meta for one in layers) and not found.head.weight.is_meta
    assert not any("stay in its files" in note for note in found.notes)
    found.stream.stop()
    for index in range(len(layers_if_any(found.network))):
        found.stream.bring(index)
    plain = load_models(load_config(overrides=tiny.settings(world)), torch.device("cpu")).loaded_teacher
    assert plain is not None
    for name, parameter in plain.network.named_parameters():
        assert torch.equal(dict(found.network.named_parameters())[name], parameter)
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():  # nothing is sent off any more
        assert torch.equal(found.network(ids).logits, found.network(ids).logits)
    cut = opened(**{"student.init": "shrink", "student.shrink.layers": (0,)})
    assert not any(one.is_meta for one in cut.network.parameters()), "the student is cut from the whole"
