"""Changes that make a run fit: in order of harm, no more than needed, and true of a real step. Its cost."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from stillroom.config import Config, load_config
from stillroom.config.load import toml_lines
from stillroom.core.errors import ConfigError
from stillroom.doctor.plan.cost import Cost, cost_of, forward_flops
from stillroom.doctor.plan.plan import changed, find_target, fit, parse_bytes
from stillroom.precision.gpus import find_gpu
from stillroom.telemetry import EventLog
from stillroom.training.build import build_run
from stillroom.training.memory import COPY, Shapes, lay_out
from stillroom.training.models import load_models
from stillroom.training.run import RunState
from stillroom.training.step import train_step
from stillroom.training.trace import LiveTensors


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitted")
    tiny.save_model(folder / "teacher", num_layers=3, width=64)
    tiny.save_model(folder / "student", num_layers=2, width=64)
    tiny.save_text(folder / "train.jsonl", count=600)
    return folder


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    return Shapes(find_target("cpu"))


def asked(world: Path, **over: Any) -> Config:
    more = {"train__batch_size": 16, "data__max_length": 128, "train__compile": "off", "data__packing": "blocks"}
    return load_config(overrides=tiny.settings(world, **{**more, **over}))


def test_what_fits_is_left_as_it_is(world: Path, shapes: Shapes) -> None:
    config = asked(world)
    fitted = fit(config, shapes, 10**12)
    assert fitted.applied == ()
    assert fitted.config == config


def test_a_smaller_micro_batch_comes_first_and_keeps_the_rows_of_a_step(world: Path, shapes: Shapes) -> None:
    config = asked(world, checkpoint__background="off")
    bound = int(0.8 * lay_out(config, shapes, "fp32").total)
    fitted = fit(config, shapes, bound)
    assert fitted.layout.total <= bound
    assert set(fitted.settings) == {"train.batch_size", "train.gradient_accumulation_steps"}
    assert fitted.config.train.rows_per_batch * fitted.config.train.gradient_accumulation_steps == 16


def test_rows_are_not_shortened_for_a_reserve(world: Path, shapes: Shapes) -> None:
    """A run that fits closely after harmless changes is not made to learn less."""
    config = asked(world, checkpoint__background="off")
    harmless = {"train.batch_size": 1, "train.gradient_accumulation_steps": 16, "student.gradient_checkpointing": True}
    bound = lay_out(changed(config, harmless), shapes, "fp32").total
    assert fit(config, shapes, bound).settings == harmless


def test_changes_come_in_order_of_harm_and_each_saves_something(world: Path, shapes: Shapes) -> None:
    fitted = fit(asked(world), shapes, 1)
    assert fitted.layout.total > 1
    assert all(one.saved > 0 for one in fitted.applied)
    order = ["checkpoint.background", "train.batch_size", "student.gradient_checkpointing", "teacher.cache",
             "teacher.placement", "precision.moments", "precision.mode", "student.adapter",
             "data.max_length"]  # fmt: skip
    places = [order.index(next(iter(one.change.settings))) for one in fitted.applied]
    assert places == sorted(places)
    assert places[:2] == [0, 1]


def test_the_copy_that_is_saved_in_the_background_is_counted(world: Path, shapes: Shapes) -> None:
    with_copy, without = (lay_out(asked(world, checkpoint__background=how), shapes, "fp32") for how in ("auto", "off"))
    assert with_copy.host[COPY] == 12 * with_copy.sizes.num_trained
    assert with_copy.total - without.total == with_copy.host[COPY]


def test_the_fitted_configuration_trains_within_the_bound(world: Path, shapes: Shapes, tmp_path: Path) -> None:
    config = asked(world)
    whole = lay_out(config, shapes, "fp32").total
    bound = int(0.45 * whole)
    fitted = fit(config, shapes, bound)
    assert fitted.layout.total <= bound < whole
    again = _read_back(fitted.config, tmp_path)
    before, after = (_real_bytes(one, tmp_path / str(number)) for number, one in enumerate((config, again)))
    assert after <= bound, (after, bound)
    assert before > bound, "the request was possible as it was"


def _read_back(config: Config, folder: Path) -> Config:
    path = folder / "fitted.toml"
    path.write_text("\n".join(toml_lines(config.to_dict())), encoding="utf-8")
    return load_config(path)


def _real_bytes(config: Config, folder: Path) -> int:
    """Tensors of a real step, counted by their storages; those of other tests are in it neither."""
    gc.collect()
    others = {id(tensor) for tensor in _tensors()}
    folder.mkdir()
    with EventLog(folder / "events.jsonl") as log:
        models = load_models(config, torch.device("cpu"), folder=folder)
        run = build_run(config, folder, log, device=torch.device("cpu"), models=models)
        run.student.train()
        state = RunState(applied=1)
        train_step(run, state, run.loader.window(0))
        gc.collect()
        known = [tensor for tensor in _tensors() if id(tensor) not in others]
        sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in known}
        live = LiveTensors(known)
        with live:
            train_step(run, state, run.loader.window(1))
        return sum(sizes.values()) + live.peak


def _tensors() -> list[torch.Tensor]:
    return [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]


def test_every_setting_survives_a_toml_file(world: Path, tmp_path: Path) -> None:
    config = changed(
        asked(world),
        {
            "student.adapter": {"rank": 4, "targets": ["q_proj"]},
            "objectives.kd.temperature": {"start": 4.0, "end": 1.0},
            "data.train": 'a "strange" name\\.jsonl',
            "curriculum.phases": [{"name": "early", "until": 0.5}, {"name": "late", "until": 1.0}],
        },
    )
    assert _read_back(config, tmp_path) == config


# ---- Cost and amounts


COST = Cost(100, 1000, 10, 4.0, 6.0, 3.0, None, "", 48.0)


def test_a_cache_pays_from_the_second_pass_on() -> None:
    assert replace(COST, passes=1.0).cached_over_live == pytest.approx(1.0)
    assert COST.cached_over_live == pytest.approx((6 + 4 * 3) / (4 * 9))


def test_a_named_card_gives_a_time_that_is_called_a_model() -> None:
    config = load_config(overrides={"train.max_steps": 10})
    gpu = find_gpu("T4")
    layout = lay_out(config, Shapes(find_target(gpu=gpu)), "fp16-mixed")
    cost = cost_of(config, layout, teacher=layout.teacher, gpu=gpu)
    assert cost.seconds_from.startswith("a model")
    assert cost.seconds_per_step is not None
    assert cost.seconds_per_step_compiled is not None and cost.seconds_per_step_at_peak is not None
    products = cost.tokens_per_step * (cost.teacher_flops_per_token + cost.student_flops_per_token)
    assert cost.seconds_per_step_at_peak > products / 65e12, "layers, rows and the update take their time too"
    assert cost.seconds_per_step > max(cost.seconds_per_step_compiled, cost.seconds_per_step_at_peak)
    assert cost.seconds_per_step_compiled > products / 24e12
    assert layout.teacher is not None
    assert cost.student_flops_per_token == 3 * forward_flops(layout.sizes, config.data.max_length)
    assert cost.ratio == cost.teacher_flops_per_token / cost.student_flops_per_token


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GB", 16 * 10**9), ("15.5 GiB", int(15.5 * 2**30)), ("800mb", 8 * 10**8), ("1024 B", 1024), ("2T", 2 * 10**12)],
)
def test_amounts_are_read_in_powers_of_ten_and_of_two(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(("text", "unit"), [("16", "GB"), ("15.9", "GB"), (" 17179869184 ", "B")])
def test_a_number_without_a_unit_is_refused_with_the_unit_it_likely_has(text: str, unit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    assert caught.value.advice[0].endswith(f" {text.strip()}{unit}")


@pytest.mark.parametrize("text", ["16XB", "", "GB", "-4GB", "0GB", "nan", "1e9", "16 GB GB"])
def test_what_is_no_amount_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    assert "16GB" in caught.value.advice[0]
