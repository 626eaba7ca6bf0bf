"""On a CPU `auto` takes BF16 by what was measured, for large students alone, and once for a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stillroom.config import Config, load_config
from stillroom.losses.head.kernel import bf16_products
from stillroom.precision import choose
from stillroom.precision.device import DeviceFacts
from stillroom.training import cpu_rates, models
from stillroom.training.build import make_precision
from stillroom.training.cpu_rates import Rates, Shape, measure, shape_of, with_rates
from stillroom.training.memory import Shapes, chosen_mode, free_here, lay_out
from stillroom.training.models import load_models

CPU = DeviceFacts("cpu")
SHAPE = Shape(tokens=64, rows=48, columns=16, vocabulary=300, width=16, body_parameters=1000)
FAST, SLOW = Rates(100, 400, 100, 300), Rates(100, 110, 100, 120)


def test_rates_decide() -> None:
    fast = DeviceFacts("cpu", bf16_gain=FAST.gain(SHAPE), measured=FAST.sentence(SHAPE))
    mode, reason = choose("auto", fast)
    assert mode == "bf16-mixed" and "400 against 100" in reason
    slow = DeviceFacts("cpu", bf16_gain=SLOW.gain(SHAPE), measured=SLOW.sentence(SHAPE))
    mode, reason = choose("auto", slow)
    assert mode == "fp32" and "110 against 100" in reason
    assert choose("auto", CPU)[0] == "fp32"
    assert choose("fp32", fast)[0] == "fp32", "what is asked for is given"
    assert choose("auto", fast, begun_in="fp32")[0] == "fp32", "a run keeps the mode it began in"


def test_the_gain_weighs_body_and_head_by_their_work() -> None:
    assert Rates(100, 200, 100, 200).gain(SHAPE) == pytest.approx(2.0)
    only_head = Rates(100, 100, 100, 400)
    head = SHAPE.vocabulary * SHAPE.width
    expected = (SHAPE.body_parameters + head) / (SHAPE.body_parameters + head / 4)
    assert only_head.gain(SHAPE) == pytest.approx(expected)


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.head = nn.Embedding(30, 4), nn.Linear(4, 12), nn.Linear(4, 30, bias=False)
        self.head.weight = self.embedding.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


def test_the_shape_is_that_of_the_students_products() -> None:
    assert shape_of(Student(), 64) == Shape(64, 12, 4, 30, 4, 48)


def test_measured_rates_are_positive() -> None:
    products = bf16_products()
    if products is None:
        pytest.skip("this CPU has no BF16 units, or there is no C++ compiler")
    assert min(vars(measure(SHAPE, products)).values()) > 0


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Rates:
        raise AssertionError("measured")

    monkeypatch.setattr(cpu_rates, "measure", refuse)
    monkeypatch.setattr(cpu_rates, "bf16_products", object)


@pytest.mark.usefixtures("unmeasured")
def test_small_students_other_devices_and_several_processes_are_not_measured() -> None:
    assert with_rates(CPU, SHAPE, cpu_rates.LEAST_PARAMETERS - 1) == CPU
    card = DeviceFacts("cuda")
    assert with_rates(card, SHAPE, 10**9) == card
    several = with_rates(CPU, SHAPE, 10**9, num_processes=2)
    assert choose("auto", several)[0] == "fp32" and "several processes" in choose("auto", several)[1]
    with pytest.raises(AssertionError, match="measured"):
        with_rates(CPU, SHAPE, cpu_rates.LEAST_PARAMETERS)


def test_a_cpu_without_units_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rates, "bf16_products", lambda: None)
    assert with_rates(CPU, SHAPE, 10**9) == CPU


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in student counts as large."""
    monkeypatch.setattr(cpu_rates, "LEAST_PARAMETERS", 1)
    monkeypatch.setattr(cpu_rates, "bf16_products", object)


def _config(**over: Any) -> Config:
    return load_config(overrides={"data.train_share": 0.02, "train.max_steps": 2, **over})


def _load(folder: Path | None = None, begun_in: str = "", **over: Any) -> models.Models:
    return load_models(_config(**over), torch.device("cpu"), folder=folder, begun_in=begun_in)


def _dtypes(network: Any) -> set[torch.dtype]:
    return {weight.dtype for weight in network.parameters()}


@pytest.mark.usefixtures("large")
def test_a_run_in_bf16_has_a_bf16_teacher_and_an_fp32_student(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rates, "measure", lambda *_: FAST)
    loaded = _load()
    assert make_precision(_config(), loaded, torch.device("cpu")).mode == "bf16-mixed"
    assert _dtypes(loaded.teacher) == {torch.bfloat16} and loaded.source.dtype == torch.bfloat16
    assert {buffer.dtype for buffer in loaded.teacher.buffers()} <= {torch.float32}, "rotary tables keep their digits"
    assert _dtypes(loaded.student) == {torch.float32}
    asked = _load(**{"teacher.dtype": "float32"})
    assert _dtypes(asked.teacher) == {torch.float32}


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("rates", [FAST, SLOW])
def test_the_plan_foresees_mode_and_teacher(monkeypatch: pytest.MonkeyPatch, rates: Rates) -> None:
    monkeypatch.setattr(cpu_rates, "measure", lambda *_: rates)
    config, shapes = _config(), Shapes(free_here(torch.device("cpu")))
    mode, _ = chosen_mode(config, shapes)
    loaded = _load()
    assert mode == make_precision(config, loaded, torch.device("cpu")).mode
    teacher = lay_out(config, shapes, mode).teacher
    assert teacher is not None and teacher.itemsize == loaded.source.dtype.itemsize


@pytest.mark.usefixtures("large")
def test_a_student_that_gains_nothing_stays_in_fp32_with_its_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rates, "measure", lambda *_: SLOW)
    loaded = _load()
    assert make_precision(_config(), loaded, torch.device("cpu")).mode == "fp32"
    assert _dtypes(loaded.teacher) == {torch.float32}


@pytest.mark.usefixtures("large", "unmeasured")
@pytest.mark.parametrize(("begun_in", "dtype"), [("bf16-mixed", torch.bfloat16), ("fp32", torch.float32)])
def test_a_resumed_run_is_not_measured_and_has_the_teacher_it_began_with(begun_in: str, dtype: torch.dtype) -> None:
    loaded = _load(begun_in=begun_in)
    assert _dtypes(loaded.teacher) == {dtype}
    assert make_precision(_config(), loaded, torch.device("cpu"), begun_in).mode == begun_in


@pytest.mark.usefixtures("large")
def test_answers_in_bf16_have_another_cache_than_those_in_fp32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    caches = []
    for rates in (FAST, SLOW):
        monkeypatch.setattr(cpu_rates, "measure", lambda *_, rates=rates: rates)
        caches.append(_load(tmp_path / "run", **{"teacher.cache": "auto"}).source.cache)
    assert caches[0] != caches[1]


@pytest.mark.usefixtures("large")
def test_a_student_cut_from_a_bf16_teacher_is_cut_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rates, "measure", lambda *_: FAST)
    over = {"student.init": "shrink", "student.shrink.layers": 2, "student.shrink.method": "even"}
    loaded = _load(**over)
    assert _dtypes(loaded.student) == {torch.float32} and _dtypes(loaded.teacher) == {torch.bfloat16}
    theirs = loaded.teacher.get_input_embeddings().weight
    assert torch.equal(loaded.student.get_input_embeddings().weight.bfloat16(), theirs)
    assert not torch.equal(loaded.student.get_input_embeddings().weight, theirs.float())
