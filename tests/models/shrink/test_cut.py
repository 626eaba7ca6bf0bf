"""Laws of students cut from their teacher."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, Qwen2Config

from stillroom.config import load_config
from stillroom.config.schema import ShrinkConfig
from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch
from stillroom.models import anatomy_of
from stillroom.models.anatomy import layers_of
from stillroom.models.shrink.cut import cut
from stillroom.models.shrink.layer_choice import evenly_spaced, settled_layers
from stillroom.models.shrink.width import measure
from stillroom.models.student import attend_causally
from stillroom.telemetry import read_events
from stillroom.training.distill import distill

FAMILIES = [
    "llama", "gpt2", "qwen3", "qwen3_moe", "mixtral", "olmoe", "gemma2", "granite", "phi", "opt", "gpt_neox",
]  # fmt: skip
WIDE = ["llama", "qwen3", "qwen2", "mistral"]
SIZE = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def teacher_of(family: str, num_layers: int = 4, *, is_tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = tiny.config(family, num_layers=num_layers)
    config.tie_word_embeddings = is_tied or config.tie_word_embeddings
    return shaken(AutoModelForCausalLM.from_config(config))


def wide_teacher(family: str) -> Any:
    """Three layers, four query heads on two key-value heads."""
    torch.manual_seed(0)
    match family:
        case "qwen2":
            config: Any = Qwen2Config(**SIZE)
        case "mistral":
            config = MistralConfig(**SIZE, sliding_window=None)
        case _:
            config = type(tiny.config(family))(**SIZE, head_dim=8)
    return shaken(AutoModelForCausalLM.from_config(config))


@torch.no_grad()
def shaken(model: Any) -> Any:
    """Away from zero biases, unit gains and tiny entries, so that each part shows."""
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    attend_causally(model)
    return model.eval()


def ids(rows: int = 3, length: int = 16) -> Tensor:
    return torch.randint(2, tiny.VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))


def batches(rows: int = 3) -> list[Batch]:
    tokens = ids(rows)
    return [Batch(tokens, torch.ones_like(tokens), tokens, torch.zeros_like(tokens), tuple("abc"[:rows]))]


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(ids()).logits
    return found


# -- depth -----------------------------------------------------------------------------------------------


@given(st.integers(1, 90), st.data())
def test_kept_layers_are_distinct_and_span_the_teacher(num_layers: int, data: st.DataObject) -> None:
    wanted = data.draw(st.integers(1, num_layers))
    kept = evenly_spaced(wanted, num_layers)
    assert len(set(kept)) == wanted and list(kept) == sorted(kept) and kept[0] == 0
    if wanted > 1:
        steps = [b - a for a, b in pairwise(kept)]
        assert kept[-1] == num_layers - 1 and max(steps) - min(steps) <= 1, "equal steps"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_that_keeps_all_layers_is_the_teacher(family: str) -> None:
    teacher = teacher_of(family)
    found = cut(teacher, ShrinkConfig())
    assert torch.equal(logits(found.model), logits(teacher)) and found.kept_layers == (0, 1, 2, 3)
    assert "nothing was cut" in found.summary


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_is_the_teacher_with_layers_taken_out(family: str, tmp_path: Path) -> None:
    teacher = teacher_of(family)
    found = cut(teacher, ShrinkConfig(layers=(0, 2)))
    student = found.model
    assert anatomy_of(student).num_layers == 2 and anatomy_of(student).is_tied == anatomy_of(teacher).is_tied
    for mine, number in zip(layers_of(student), (0, 2), strict=True):
        theirs = layers_of(teacher)[number].state_dict()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.state_dict().items())
    student.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(student))


def test_the_teacher_is_not_changed_and_the_student_is_trainable() -> None:
    teacher = teacher_of("llama").requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    student = cut(teacher, ShrinkConfig(layers=2)).model
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    assert all(parameter.requires_grad for parameter in student.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert teacher.config.num_hidden_layers == 4


@pytest.mark.parametrize("wanted", [5, (0, 4), (2, 1), (1, 1), (-1, 2), ()])
def test_layers_that_cannot_be_kept_are_refused(wanted: int | tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        settled_layers(wanted, 4)
    assert caught.value.where == "student.shrink.layers" and caught.value.advice


def test_tied_embeddings_and_generation_settings_stay() -> None:
    teacher = teacher_of("llama", is_tied=True)
    teacher.generation_config.top_p = 0.7
    student = cut(teacher, ShrinkConfig(layers=1, width=16), batches()).model
    assert anatomy_of(student).is_tied and student.lm_head.weight is student.model.embed_tokens.weight
    assert student.generation_config.top_p == 0.7 and student.generation_config is not teacher.generation_config


# -- width -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", WIDE)
def test_a_cut_to_the_full_width_is_the_teacher(family: str) -> None:
    teacher = wide_teacher(family)
    student = cut(teacher, ShrinkConfig(width=32, mlp_width=48, heads=4), batches()).model
    assert torch.equal(logits(student), logits(teacher))


@pytest.mark.parametrize("family", WIDE)
def test_a_narrow_student_is_an_ordinary_model(family: str, tmp_path: Path) -> None:
    student = cut(wide_teacher(family), ShrinkConfig(layers=2, width=24, mlp_width=16, heads=2), batches()).model
    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(student))
    config = again.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (24, 16, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 8)
    assert torch.isfinite(logits(again)).all()


@torch.no_grad()
def silence(teacher: Any, channels: list[int], neurons: list[int], group: int) -> None:
    """Make some channels, neurons and a group of heads say nothing, wherever they are written."""
    teacher.model.embed_tokens.weight[:, channels] = 0
    for block in teacher.model.layers:
        for linear in (block.self_attn.o_proj, block.mlp.down_proj):
            linear.weight[channels] = 0
            if linear.bias is not None:
                linear.bias[channels] = 0
        block.mlp.up_proj.weight[neurons] = 0
        block.self_attn.v_proj.weight[8 * group : 8 * (group + 1)] = 0
        if block.self_attn.v_proj.bias is not None:
            block.self_attn.v_proj.bias[8 * group : 8 * (group + 1)] = 0


@pytest.mark.parametrize("family", WIDE)
def test_importance_finds_what_is_silent_and_cutting_it_changes_nothing(family: str) -> None:
    teacher = wide_teacher(family)
    silence(teacher, [1, 7, 20, 31], [0, 5, 40], group=0)
    student = cut(teacher, ShrinkConfig(width=28, mlp_width=45, heads=2), batches()).model
    kept = [channel for channel in range(32) if channel not in (1, 7, 20, 31)]
    assert torch.equal(student.model.embed_tokens.weight, teacher.model.embed_tokens.weight[:, kept])
    assert torch.allclose(logits(student), logits(teacher), atol=1e-3 * float(logits(teacher).std()))


def test_permuting_channels_neurons_and_groups_does_not_matter() -> None:
    teacher = wide_teacher("llama")
    wanted = ShrinkConfig(width=20, mlp_width=30, heads=2)
    plain = logits(cut(teacher, wanted, batches()).model)
    channels, neurons = torch.randperm(32), torch.randperm(48)
    swapped = torch.arange(32).view(2, 16).flip(0).reshape(-1)
    swapped_keys = torch.arange(16).view(2, 8).flip(0).reshape(-1)
    with torch.no_grad():
        for block in teacher.model.layers:
            attention, mlp = block.self_attn, block.mlp
            attention.q_proj.weight.copy_(attention.q_proj.weight[swapped])
            for linear in (attention.k_proj, attention.v_proj):
                linear.weight.copy_(linear.weight[swapped_keys])
            attention.o_proj.weight.copy_(attention.o_proj.weight[:, swapped])
            for linear in (mlp.gate_proj, mlp.up_proj):
                linear.weight.copy_(linear.weight[neurons])
            mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, neurons])
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                linear.weight.copy_(linear.weight[:, channels])
            for linear in (attention.o_proj, mlp.down_proj):
                linear.weight.copy_(linear.weight[channels])
        for norm in [m for m in teacher.modules() if type(m).__name__.endswith("Norm")]:
            norm.weight.copy_(norm.weight[channels])
        for table in (teacher.model.embed_tokens, teacher.lm_head):
            table.weight.copy_(table.weight[:, channels])
    permuted = logits(cut(teacher, wanted, batches()).model)
    assert torch.allclose(permuted, plain, atol=1e-4 * float(plain.std()))


def test_padding_has_no_say_in_what_matters() -> None:
    teacher = wide_teacher("llama")
    tokens = torch.nn.functional.pad(ids(), (0, 6), value=9)
    mask = torch.nn.functional.pad(torch.ones_like(ids()), (0, 6))
    padded = Batch(tokens, mask, tokens, torch.zeros_like(tokens), tuple("abc"))
    one, two = measure(teacher, batches()), measure(teacher, [padded])
    assert one.num_positions == two.num_positions == 48
    for layer, sums in one.neurons.items():
        torch.testing.assert_close(two.neurons[layer], sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "wanted", "said"),
    [
        ("gpt2", {"width": 16}, "not described"),
        ("gemma2", {"mlp_width": 16}, "not described"),
        ("llama", {"width": 33}, "the teacher has 32"),
        ("llama", {"heads": 3}, "split a group"),
    ],
)
def test_widths_that_cannot_be_cut_are_refused(family: str, wanted: dict[str, int], said: str) -> None:
    teacher = wide_teacher(family) if family in WIDE else teacher_of(family)
    with pytest.raises(ConfigError, match=said) as caught:
        cut(teacher, ShrinkConfig(**wanted), batches())
    assert caught.value.advice


def test_a_width_without_text_is_refused() -> None:
    with refused(ConfigError, "student.shrink"):
        cut(wide_teacher("llama"), ShrinkConfig(width=16))


# -- runs ------------------------------------------------------------------------------------------------


def test_a_run_begins_near_its_teacher_and_leaves_an_ordinary_student(world: Path, tmp_path: Path) -> None:
    over = {**tiny.settings(world), "student.init": "shrink", "student.shrink.mlp_width": 64, "train.max_steps": 4}
    over |= {"objectives.layerwise.weight": 0.1, "student.model": "builtin:student"}
    result = distill(load_config(overrides=over), tmp_path / "run", device="cpu")
    events = read_events(result.folder / "events.jsonl")
    notes = " ".join(event["text"] for event in events if event["event"] == "note")
    assert "student cut from the teacher's float32 weights: layers 0, 1 of 2; mlp width 64" in notes
    assert "0 to 0, 1 to 1" in notes, "each layer is compared with the one it once was"
    start = next(event for event in events if event["event"] == "run_start")
    assert start["student"]["name"].endswith("(cut)")
    random = distill(load_config(overrides=tiny.settings(world)), tmp_path / "other", device="cpu")
    assert result.summary["student_before"]["kl"] < random.summary["student_before"]["kl"]
    student = AutoModelForCausalLM.from_pretrained(result.folder / "student")
    assert student.config.intermediate_size == 64
    assert len(AutoTokenizer.from_pretrained(result.folder / "student")) == tiny.VOCAB


def test_a_student_may_be_cut_for_labels_alone(world: Path, tmp_path: Path) -> None:
    over = {**tiny.settings(world), "student.init": "shrink", "student.shrink.layers": 1, "student.model": "ignored"}
    over |= {"objectives.kd.weight": 0.0, "objectives.ce.weight": 1.0, "train.max_steps": 2}
    result = distill(load_config(overrides=over), tmp_path / "run", device="cpu")
    notes = [event["text"] for event in read_events(result.folder / "events.jsonl") if event["event"] == "note"]
    assert "teacher" not in result.summary
    assert "student.model = ignored is not read: the student is cut" in notes


def test_a_cut_that_is_not_asked_for_is_refused() -> None:
    with refused(ConfigError, "", "student.init = 'shrink'"):
        load_config(overrides={"student.shrink.layers": 2})
