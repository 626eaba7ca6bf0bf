"""Laws of the layers that a student keeps when only their number is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from transformers import AutoModelForCausalLM

from stillroom.config import load_config
from stillroom.config.schema import ShrinkConfig
from stillroom.core.errors import ConfigError, Interrupted
from stillroom.core.types import IGNORED, Batch
from stillroom.models.anatomy import layers_of
from stillroom.models.shrink import layer_choice
from stillroom.models.shrink.cut import cut
from stillroom.models.shrink.layer_choice import (
    Bypass,
    cost_of_loss,
    evenly_spaced,
    losses_without_one,
    mean_loss,
    num_positions,
    num_scored,
    passages,
)
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume
from stillroom.training.loop import Stop
from stillroom.training.student import start_note

FAMILIES = ["llama", "gpt2", "gemma2", "mixtral", "opt", "gpt_oss", "llama4"]
CPU = torch.device("cpu")


def teacher_of(family: str = "llama", num_layers: int = 4) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.config(family, num_layers=num_layers))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def batch(rows: int = 3, length: int = 20, *, padding: int = 0) -> Batch:
    ids = torch.randint(2, tiny.VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))
    targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], dim=1)
    mask = torch.ones_like(ids)

    def padded(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, padding), value=value)

    names = tuple(f"row {row}" for row in range(rows))
    ids = padded(ids, 9)
    return Batch(ids, padded(mask, 0), padded(targets, IGNORED), torch.zeros_like(ids), names)


@torch.no_grad()
def silence(teacher: Any, chosen: list[int]) -> None:
    """Layers that hand on what they are given."""
    for layer in chosen:
        block = layers_of(teacher)[layer]
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()


# -- what is chosen --------------------------------------------------------------------------------------


def test_a_candidate_is_given_up_only_where_it_is_worse_beyond_doubt() -> None:
    teacher = teacher_of(num_layers=6)
    texts = passages([batch(rows=4)], 76, CPU)
    with torch.no_grad():
        raced = losses_without_one(Bypass(teacher), range(6), range(6), texts)
        alone = {layer: losses_without_one(Bypass(teacher), range(6), [layer], texts)[layer] for layer in range(6)}
    assert raced == {layer: loss for layer, loss in alone.items() if layer in raced}
    assert min(alone, key=alone.__getitem__) in raced
    gone = torch.tensor([9.0, 9.5, 8.5]).double()
    kept = {0: torch.tensor([1.0, 1.5, 0.9]).double(), 1: torch.tensor([1.1, 1.4, 1.0]).double()}
    assert layer_choice._still_possible({**kept, 2: gone}).keys() == kept.keys()
    broken = {0: kept[0], 1: torch.full((3,), torch.nan).double()}
    assert layer_choice._still_possible(broken).keys() == {0, 1}, "and counts as infinite in the end"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_measured_without_a_layer_is_that_of_the_cut_student(family: str) -> None:
    """The measurement runs the teacher with stand-ins and begins above the layer: a student built anew must agree."""
    teacher = teacher_of(family)
    texts = passages([batch()], 40, CPU)
    kept = [0, 1, 3]
    for layer in kept:
        with torch.no_grad():
            found = losses_without_one(Bypass(teacher), kept, [layer], texts)
        student = cut(teacher, ShrinkConfig(layers=tuple(other for other in kept if other != layer))).model
        assert found[layer] == pytest.approx(mean_loss(student, texts), rel=1e-4)


def test_layers_that_do_nothing_have_no_influence_and_go_first() -> None:
    teacher = teacher_of(num_layers=6)
    silence(teacher, [0, 3])
    found = cut(teacher, ShrinkConfig(layers=4, method="influence"), [batch()])
    assert found.kept_layers == (1, 2, 4, 5) and found.choice.method == "influence"
    ids = batch().input_ids
    with torch.no_grad():
        torch.testing.assert_close(found.model.eval()(ids).logits, teacher(ids).logits)


def test_layers_that_do_nothing_cost_nothing() -> None:
    teacher = teacher_of(num_layers=6)
    silence(teacher, [0, 3])
    texts = passages([batch()], 60, CPU)
    student = cut(teacher, ShrinkConfig(layers=4, method="loss"), [batch()]).model
    assert mean_loss(student, texts) <= mean_loss(teacher, texts) + 1e-5


def test_no_other_layer_could_go_at_a_lower_loss() -> None:
    teacher = teacher_of(num_layers=5)
    texts = passages([batch()], 60, CPU)
    found = cut(teacher, ShrinkConfig(layers=4, method="loss"), [batch()])
    others = [
        mean_loss(cut(teacher, ShrinkConfig(layers=tuple(x for x in range(5) if x != gone))).model, texts)
        for gone in range(5)
    ]
    assert mean_loss(found.model, texts) == pytest.approx(min(others), rel=1e-5)


def test_a_choice_leaves_the_teacher_as_it_was() -> None:
    teacher = teacher_of().train()
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    first = cut(teacher, ShrinkConfig(layers=2, method="loss"), [batch()])
    assert teacher.training and not any("forward" in vars(block) for block in layers_of(teacher))
    assert not any(block._forward_hooks for block in layers_of(teacher))
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert cut(teacher, ShrinkConfig(layers=2, method="loss"), [batch()]).choice == first.choice, "and is repeatable"


def test_padding_and_unscored_targets_have_no_say_in_the_choice() -> None:
    plain, padded = passages([batch()], 1_000, CPU), passages([batch(padding=7)], 1_000, CPU)
    assert [text.ids.tolist() for text in plain] == [text.ids.tolist() for text in padded]
    assert num_scored(plain) == 3 * 19
    unscored = batch()
    unscored.targets[1] = IGNORED
    assert len(passages([unscored], 1_000, CPU)) == 2, "a row without a scored token is passed over"
    assert num_scored(passages([batch()], 25, CPU)) == 25
    late = batch(length=400)
    late.targets[:, :390] = IGNORED
    (first, *_) = passages([late], 100, CPU)
    assert first.ids.shape[1] == 32 + 9 and first.num_scored == 9, "a long prompt is cut before its answer, not after"


def test_widths_are_measured_in_what_is_left_of_the_teacher() -> None:
    teacher = teacher_of(num_layers=3)
    heard: list[int] = []
    for number, block in enumerate(layers_of(teacher)):
        block.mlp.register_forward_hook(lambda *_args, number=number: heard.append(number))
    cut(teacher, ShrinkConfig(layers=(0, 2), mlp_width=32), [batch()])
    assert heard.count(0) == heard.count(2) == heard.count(1) + 1, "a layer that goes is not asked"


# -- how it is chosen ------------------------------------------------------------------------------------


def test_auto_measures_the_loss_where_it_is_affordable_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teacher_of()
    found = cut(teacher, ShrinkConfig(layers=2), [batch()])
    assert found.choice.method == "loss" and "auto took loss" in " ".join(found.notes)
    monkeypatch.setattr(layer_choice, "BUDGET_CPU", cost_of_loss(teacher, 2, 57) - 1)
    found = cut(teacher, ShrinkConfig(layers=2), [batch()])
    assert found.choice.method == "influence" and "auto took influence" in " ".join(found.notes)
    assert cut(teacher, ShrinkConfig(layers=2, method="loss"), [batch()]).choice.method == "loss", "asked is asked"
    found = cut(teacher, ShrinkConfig(layers=2))
    assert found.choice.method == "even" and found.kept_layers == (0, 3) and "no text" in " ".join(found.notes)


def test_the_estimate_counts_the_operations_of_the_layers_that_run() -> None:
    teacher = teacher_of("llama", 5)
    texts = passages([batch()], 57, CPU)
    done = 0

    def count(module: Any, args: Any, _output: Any) -> None:
        nonlocal done
        done += 2 * module.weight.numel() * args[0].shape[:-1].numel()

    for module in teacher.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(count)
    layer_choice.by_loss(teacher, 2, texts, lambda _layers: True, lambda _text: None)
    assert 0.5 < done / cost_of_loss(teacher, 2, num_positions(texts)) < 1.25


@pytest.mark.parametrize("method", ["loss", "influence"])
def test_a_method_that_needs_text_is_refused_without(method: Any) -> None:
    with refused(ConfigError, "student.shrink.method") as caught:
        cut(teacher_of(), ShrinkConfig(layers=2, method=method))
    assert caught.value.where == "student.shrink.method" and caught.value.advice


def test_a_method_that_has_nothing_to_choose_is_said_to_be_unused() -> None:
    for wanted in (ShrinkConfig(layers=(0, 2), method="loss"), ShrinkConfig(method="loss")):
        assert "student.shrink.method = loss is not read" in " ".join(cut(teacher_of(), wanted, [batch()]).notes)
    assert "is not read" not in " ".join(cut(teacher_of(), ShrinkConfig(layers=(0, 2))).notes)


# -- runs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of four layers that knows its text."""
    folder = tmp_path_factory.mktemp("deep")
    tiny.save_trained(folder / "teacher", width=32, num_layers=4, steps=40)
    tiny.save_text(folder / "train.jsonl")
    return folder


def settings(deep: Path, **over: Any) -> Any:
    base = {**tiny.settings(deep), "student.init": "shrink", "student.shrink.layers": 3, "train.max_steps": 4}
    base |= {"student.model": "builtin:student", "objectives.layerwise.weight": 0.1}
    return load_config(overrides={**base, **{key.replace("__", "."): value for key, value in over.items()}})


@pytest.fixture
def interrupted(deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Begins a run and stops it after two steps."""

    def begin() -> Path:
        wanted = iter([False, True])
        with monkeypatch.context() as patch:
            patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, False))
            with pytest.raises(Interrupted):
                distill(settings(deep), tmp_path / "parts", device="cpu")
        return tmp_path / "parts"

    return begin


def kept_by(folder: Path) -> list[int]:
    kept: list[int] = json.loads((folder / "cut.json").read_text(encoding="utf-8"))["layers"]
    return kept


def pairs_of(kept: list[int]) -> str:
    return ", ".join(f"{place} to {layer}" for place, layer in enumerate(kept))


def notes_of(folder: Path) -> str:
    return " ".join(event["text"] for event in read_events(folder / "events.jsonl") if event["event"] == "note")


def test_a_run_says_what_was_kept_and_why_and_how_the_student_stands(deep: Path, tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    result = distill(settings(deep), tmp_path / "run", device="cpu", listeners=(heard.append,))
    notes = notes_of(result.folder)
    kept = kept_by(result.folder)
    assert kept != list(evenly_spaced(3, 4)), "this teacher shows the difference"
    assert f"layers {', '.join(map(str, kept))} of 4" in notes and "auto took loss" in notes
    assert "layers kept by loss: one after another" in notes
    assert f"layerwise: layers of the student to layers of the teacher, counted from 0: {pairs_of(kept)}" in notes
    before = result.summary["student_before"]["perplexity"]
    assert f"right after the cut the student's held-out perplexity is {before:,.4g}" in notes
    said = [event for event in heard if event["event"] != "stage"]
    assert said[0]["text"] == "choosing 3 of 4 layers by loss on 768 tokens"


def test_a_resumed_run_keeps_its_layers_and_chooses_nothing_again(
    deep: Path, tmp_path: Path, interrupted: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = distill(settings(deep), tmp_path / "whole", device="cpu")
    folder = interrupted()

    def fail(*_args: Any, **_options: Any) -> Any:
        raise AssertionError("chosen again")

    monkeypatch.setattr(layer_choice, "by_loss", fail)
    monkeypatch.setattr(layer_choice, "by_influence", fail)
    parts = resume(folder, device="cpu")
    assert parts.summary["student"]["perplexity"] == whole.summary["student"]["perplexity"]
    assert kept_by(folder) == kept_by(whole.folder)
    assert notes_of(folder).count(pairs_of(kept_by(folder))) == 2, "before and after, the same layers are compared"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is missing"),
        ("{", "damaged"),
        ('{"layers": [0, 1], "of": 4, "method": "loss", "why": []}', "does not name 3 of 4"),
        ('{"layers": [0, 1, 2], "of": 9, "method": "loss", "why": []}', "does not name 3 of 4"),
        ('{"layers": [0, 2, 1], "of": 4, "method": "loss", "why": []}', "not ascending"),
        ('{"of": 4}', "damaged"),
    ],
)
def test_a_run_whose_choice_is_lost_is_not_continued_with_another(
    interrupted: Callable[[], Path], content: str | None, said: str
) -> None:
    folder = interrupted()
    path = folder / "cut.json"
    path.unlink()
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as caught:
        resume(folder, device="cpu")
    assert caught.value.advice and caught.value.exit_code == 2


def test_a_student_worse_than_guessing_is_said_to_be() -> None:
    even, loss = ShrinkConfig(layers=2, method="even"), ShrinkConfig(layers=2)
    assert "guessing" not in start_note(loss, 319.0, 320, 12.0)
    note = start_note(even, 540_000.0, 320, 12.0)
    assert "worse than guessing among the 320 tokens" in note and "student.shrink.method = 'loss'" in note
    assert "student.shrink.method" not in start_note(loss, 540_000.0, 320), "what was done already is no advice"
