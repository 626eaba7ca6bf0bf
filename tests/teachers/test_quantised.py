"""Laws of a quantised teacher: smaller, measured against the full one, and refused where it says something else."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from torch import nn
from torch.nn import functional as F

from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import BrokenAtStart
from stillroom.core.types import IGNORED, Batch, Needs
from stillroom.models import LoadedModel, open_teacher
from stillroom.teachers import quantize as module
from stillroom.teachers.live import LiveTeacher
from stillroom.teachers.quantize import check_quantisation, quantised, quantised_bytes, stored_bytes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_trained(tmp_path_factory.mktemp("full") / "teacher", width=32, num_layers=2, steps=60)


def section(folder: Path, **over: Any) -> TeacherConfig:
    return TeacherConfig(model=str(folder), quantisation="int8", **over)


def opened(folder: Path) -> LoadedModel:
    return open_teacher(TeacherConfig(model=str(folder)), torch.float32)


def rows(count: int = 6, length: int = 16) -> list[Batch]:
    """Single rows of real text."""
    words = tiny.tokenizer()
    ids = torch.tensor([i for line in tiny.sentences(60, 5) for i in [*words(line)["input_ids"], 0]])
    found = []
    for number in range(count):
        row = ids[number * length : (number + 1) * length][None]
        targets = row.roll(-1, dims=1).clone()
        targets[:, -1] = IGNORED
        found.append(Batch(row, torch.ones_like(row), targets, torch.ones_like(row), (str(number),)))
    return found


@torch.no_grad()
def log_probs(network: Any, batch: Batch) -> torch.Tensor:
    return F.log_softmax(network(input_ids=batch.input_ids, use_cache=False).logits.double(), -1)[:, :-1].flatten(0, 1)


def test_the_measured_kl_is_that_of_the_two_networks(folder: Path) -> None:
    batches, loaded = rows(), opened(folder)
    full = [log_probs(loaded.network, batch) for batch in batches]
    before = stored_bytes(loaded.network)
    ready, found = quantised(loaded, section(folder), batches, vocab_size=tiny.VOCAB, device=CPU)
    now = [log_probs(ready.network, batch) for batch in batches]
    expected = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(full, now, strict=True)]).mean()
    # Log-probabilities in FP32 are good to about 1e-7, which is 2 % of so small a distance.
    assert found.kl == pytest.approx(float(expected), rel=1e-3, abs=1e-7) and 0.0 < found.kl < 0.05
    assert found.positions == 6 * 15 and found.layers == 2 * 7
    assert found.full_bytes == before and found.bytes == stored_bytes(ready.network)
    as_they_are = 2 * 4 * 32 * tiny.VOCAB  # head and embeddings
    assert found.bytes - as_they_are < 0.35 * (before - as_they_are)
    assert ready.anatomy == loaded.anatomy, "the number of parameters is that of the full teacher"


def test_the_full_weights_are_let_go_of(folder: Path) -> None:
    loaded = opened(folder)
    layers = [weakref.ref(part.weight) for part in loaded.network.model.layers.modules() if isinstance(part, nn.Linear)]
    quantised(loaded, section(folder), rows(), vocab_size=tiny.VOCAB, device=CPU)
    gc.collect()
    assert len(layers) == 14 and not any(weight() is not None for weight in layers)


def test_the_head_and_the_embeddings_stay_as_they_are(folder: Path) -> None:
    loaded, other = opened(folder), opened(folder)
    ready, _found = quantised(loaded, section(folder), rows(), vocab_size=tiny.VOCAB, device=CPU)
    for part in (ready.network.get_output_embeddings(), ready.network.get_input_embeddings()):
        assert type(part.weight.data) is torch.Tensor
    assert torch.equal(ready.network.get_output_embeddings().weight, other.network.get_output_embeddings().weight)


def test_an_error_above_the_bound_is_refused_with_both_numbers(folder: Path) -> None:
    asked = section(folder, max_quantisation_kl=1e-9)
    with refused(BrokenAtStart, "", "teacher.max_quantisation_kl = 1e-09") as caught:
        quantised(opened(folder), asked, rows(), vocab_size=tiny.VOCAB, device=CPU)
    _ready, found = quantised(opened(folder), section(folder), rows(), vocab_size=tiny.VOCAB, device=CPU)
    assert f"{found.kl:.4g} nats" in caught.value.what and caught.value.exit_code == 20
    assert "--set teacher.quantisation=none" in caught.value.advice[0]


def test_answers_that_cannot_be_compared_are_refused(folder: Path) -> None:
    with refused(BrokenAtStart, "", "teacher.max_quantisation_kl", "nan"):
        quantised(opened(folder), section(folder), [], vocab_size=tiny.VOCAB, device=CPU)


def test_rows_are_taken_until_there_are_enough_positions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_POSITIONS", 20)
    asked = iter(rows())
    _ready, found = quantised(opened(folder), section(folder), asked, vocab_size=tiny.VOCAB, device=CPU)
    assert found.positions == 20 and len(list(asked)) == 4, "two rows of fifteen"


def test_a_full_teacher_that_does_not_fit_on_the_device_is_measured_in_main_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ready, expected = quantised(opened(folder), section(folder), rows(), vocab_size=tiny.VOCAB, device=CPU)
    places: list[str] = []
    answers = module._Probe.answers

    class Card:
        """The CPU under another name."""

        type = "card"

    def short(probe: Any, batches: Any, device: Any) -> Any:
        places.append(device.type)
        if device.type == "card":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return answers(probe, batches, device)

    monkeypatch.setattr(module._Probe, "answers", short)
    monkeypatch.setattr(module._Probe, "divergence", lambda *_: (expected.kl, expected.positions))
    loaded = opened(folder)
    monkeypatch.setattr(loaded.network, "to", lambda _device: loaded.network)
    _ready, found = quantised(loaded, section(folder), rows(), vocab_size=tiny.VOCAB, device=Card())  # type: ignore[arg-type]
    assert places == ["card", "cpu"] and found == expected


def test_a_teacher_without_linear_layers_is_refused_by_name(tmp_path: Path) -> None:
    """GPT-2 multiplies by modules of its own, which torchao leaves alone."""
    folder = tiny.save_model(tmp_path / "gpt2", "gpt2")
    with refused(BrokenAtStart, "teacher.quantisation", "GPT2LMHeadModel") as caught:
        quantised(opened(folder), section(folder), rows(), vocab_size=tiny.VOCAB, device=CPU)
    assert caught.value.exit_code == 20


def test_a_teacher_whose_head_cannot_be_described_is_measured_by_its_own_logits(folder: Path) -> None:
    loaded = opened(folder)
    object.__setattr__(loaded, "is_described", False)
    batches = rows()
    full = torch.cat([log_probs(loaded.network, batch) for batch in batches])[: module._OWN_LOGITS_POSITIONS]
    ready, found = quantised(loaded, section(folder), batches, vocab_size=tiny.VOCAB, device=CPU)
    now = torch.cat([log_probs(ready.network, batch) for batch in batches])[: module._OWN_LOGITS_POSITIONS]
    assert found.positions == module._OWN_LOGITS_POSITIONS
    kl = float((full.exp() * (full - now)).sum(-1).mean())
    assert found.kl == pytest.approx(kl, rel=1e-3, abs=1e-7)  # a few millionths: FP32 rounds both sums


def test_a_quantised_teacher_answers_a_batch(folder: Path) -> None:
    ready, found = quantised(opened(folder), section(folder), rows(), vocab_size=tiny.VOCAB, device=CPU)
    live = LiveTeacher(
        ready.network, vocab_size=tiny.VOCAB, device=CPU, offload=False, is_described=True, facts=ready.facts
    )
    assert live.observe(rows()[0], Needs()).hidden.shape == (15, 32)
    assert live.summary() == {"teacher_quantisation": found.to_dict()}


@pytest.mark.parametrize("kind", ["bnb-8bit", "bnb-4bit"])
def test_bitsandbytes_is_refused_without_a_card(folder: Path, kind: Any) -> None:
    with refused(BrokenAtStart, "teacher.quantisation", f"'{kind}'", "cpu") as caught:
        check_quantisation(TeacherConfig(model=str(folder), quantisation=kind), CPU)
    assert caught.value.exit_code == 20 and caught.value.where == "teacher.quantisation"
    assert kind in caught.value.what and "int8" in caught.value.advice[0]


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [("int8", "torchao", "quantised"), ("bnb-4bit", "bitsandbytes", "bitsandbytes")],
)
def test_a_missing_package_is_named_with_its_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with refused(BrokenAtStart, "teacher.quantisation", package) as caught:
        check_quantisation(TeacherConfig(model=str(folder), quantisation=kind), torch.device("cuda"))
    assert caught.value.exit_code == 20 and caught.value.advice[0] == f"pip install 'stillroom[{extra}]'"


def test_layers_of_bitsandbytes_take_the_place_of_all_but_the_head(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for the library, which needs a card: which layers are replaced, with which weights."""
    made: list[Any] = []

    class Stored(nn.Parameter):
        def __new__(cls, weight: torch.Tensor, **settings: Any) -> Any:
            made.append(settings)
            return super().__new__(cls, weight, requires_grad=settings["requires_grad"])

    class Linear(nn.Linear):
        def __init__(self, inputs: int, outputs: int, bias: bool, **settings: Any) -> None:
            super().__init__(inputs, outputs, bias)
            made.append(settings)

    library = SimpleNamespace(
        nn=SimpleNamespace(Linear4bit=Linear, Params4bit=Stored, Linear8bitLt=Linear, Int8Params=Stored)
    )
    loaded, batch = opened(folder), rows()[0]
    before = log_probs(loaded.network, batch)
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    for kind, expected in (("bnb-8bit", {"has_fp16_weights": False}), ("bnb-4bit", {"quant_type": "nf4"})):
        loaded = opened(folder)
        made.clear()
        assert module.quantise_layers(loaded.network, kind, CPU, name="teacher") == 14
        assert len(made) == 28 and all(expected.items() <= settings.items() for settings in made)
        kinds = {name: type(part) for name, part in loaded.network.named_modules() if isinstance(part, nn.Linear)}
        assert kinds.pop("lm_head") is nn.Linear and set(kinds.values()) == {Linear}
        assert torch.equal(log_probs(loaded.network, batch), before), "this stand-in does not quantise"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_size_is_known_before_a_teacher_is_quantised(folder: Path, dtype: torch.dtype) -> None:
    network = open_teacher(TeacherConfig(model=str(folder)), dtype).network
    buffers = sum(one.numel() * one.element_size() for one in network.buffers())
    assert quantised_bytes(network, "none") == stored_bytes(network) - buffers
    expected = quantised_bytes(network, "int8")
    module.quantise_layers(network, "int8", CPU, name="teacher")
    assert expected == pytest.approx(stored_bytes(network) - buffers, rel=0.01), "versions store other zero points"
