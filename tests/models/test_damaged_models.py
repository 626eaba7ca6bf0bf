"""Damaged and foreign model folders: each ends at the start with a reason, and sound ones of any kind load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from damage import ask, cut_short, edit, refused, rewrite, train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stillroom.config.schema import TeacherConfig
from stillroom.models import LoadedModel, open_teacher

# -- weights ---------------------------------------------------------------------------------------------


def broken_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:40])


WEIGHTS: dict[str, Callable[[Path], object]] = {
    "cut short": cut_short,
    "a header cut short": broken_header,
    "empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "something else": lambda folder: (folder / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(4000)),
    "a page of a web server": lambda folder: (folder / "model.safetensors").write_text("<html>404</html>" * 50),
    "a pointer of git lfs": lambda folder: (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 400\n"
    ),
}


@pytest.mark.parametrize("how", [ask, train])
@pytest.mark.parametrize("damage", WEIGHTS)
def test_weights_that_are_no_safetensors_are_refused(
    model_folder: Path, damage: str, how: Callable[[Path], LoadedModel]
) -> None:
    WEIGHTS[damage](model_folder)
    assert refused(model_folder, str(model_folder), how=how)


@pytest.mark.parametrize("how", [ask, train])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_a_weight_that_the_file_lacks_is_never_drawn_at_random(
    model_folder: Path, name: str, how: Callable[[Path], LoadedModel]
) -> None:
    rewrite(model_folder, lambda tensors: tensors.pop(name))
    assert refused(model_folder, "misses", name, how=how)


@pytest.mark.parametrize("how", [ask, train])
def test_a_file_without_tensors_is_refused(model_folder: Path, how: Callable[[Path], LoadedModel]) -> None:
    rewrite(model_folder, lambda tensors: tensors.clear())
    assert refused(model_folder, "misses", "and 8 more", how=how)


def test_weights_that_the_model_has_no_place_for_are_refused(model_folder: Path) -> None:
    rewrite(model_folder, lambda tensors: tensors.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(4, 4)}))
    assert refused(model_folder, "no such weight", "model.layers.7.mlp.up_proj.weight")


def test_weights_of_another_size_are_refused_with_both_sizes(model_folder: Path) -> None:
    edit(model_folder, vocab_size=400)
    assert refused(model_folder, "another size", "lm_head.weight", "320 x 16", "400 x 16")


def test_constants_of_an_older_file_are_said_and_harmless(model_folder: Path) -> None:
    rewrite(model_folder, lambda tensors: tensors.update({"model.layers.0.self_attn.masked_bias": torch.tensor(-1e4)}))
    assert "masked_bias" in " ".join(ask(model_folder).notes)


def test_a_file_of_the_body_alone_loads_where_the_head_is_tied(tmp_path: Path) -> None:
    """As the first GPT-2 files are: names without their prefix, masks among the weights, no head."""
    AutoModelForCausalLM.from_config(tiny.config("gpt2", width=16, num_layers=1)).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight", None))
    tensors = {
        name.removeprefix("transformer."): value for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = ask(tmp_path)
    assert torch.equal(found.head.weight, tensors["wte.weight"]) and found.anatomy.is_tied


def test_rotary_tables_of_an_older_file_are_no_weights(model_folder: Path) -> None:
    rewrite(
        model_folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    )
    assert ask(model_folder).is_described


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    config = tiny.config("llama", width=16, num_layers=1)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    assert "lm_head.weight" not in load_file(tmp_path / "model" / "model.safetensors")
    assert ask(tmp_path / "model").anatomy.is_tied


def test_a_head_of_its_own_is_not_lost_to_a_flag_that_ties(model_folder: Path) -> None:
    """The file has two different tables and the configuration says they are one."""
    held = load_file(model_folder / "model.safetensors")["lm_head.weight"]
    edit(model_folder, tie_word_embeddings=True)
    assert torch.equal(ask(model_folder).head.weight, held)


def test_weights_that_are_not_finite_are_named(model_folder: Path) -> None:
    rewrite(model_folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    assert refused(model_folder, "not finite", "model.norm.weight")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_weights_stored_as_integers_are_refused(model_folder: Path, dtype: torch.dtype) -> None:
    """Codes of a quantised model without its recipe would be read as numbers."""

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = (tensors["lm_head.weight"] * 100).to(dtype)

    rewrite(model_folder, quantise)
    assert refused(model_folder, "lm_head.weight")


# -- what must still load --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_student_is_float32_whatever_its_file_holds(model_folder: Path, dtype: torch.dtype) -> None:
    before = load_file(model_folder / "model.safetensors")["lm_head.weight"]
    rewrite(model_folder, lambda tensors: tensors.update({name: value.to(dtype) for name, value in tensors.items()}))
    found = train(model_folder)
    assert {parameter.dtype for parameter in found.network.parameters()} == {torch.float32}
    assert torch.equal(found.head.weight, before.to(dtype).float())


def test_shards_and_metadata_load_like_one_file(model_folder: Path, tmp_path: Path) -> None:
    one = ask(model_folder)
    one.network.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    tiny.tokenizer().save_pretrained(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    many = ask(tmp_path / "shards")
    for mine, theirs in zip(one.network.parameters(), many.network.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    save_file(
        load_file(model_folder / "model.safetensors"),
        model_folder / "model.safetensors",
        metadata={"by": "x", "format": "pt"},
    )
    assert torch.equal(ask(model_folder).head.weight, one.head.weight)


def test_a_model_in_half_precision_comes_back_from_its_trial_bit_for_bit(model_folder: Path) -> None:
    held = load_file(model_folder / "model.safetensors")
    found = open_teacher(TeacherConfig(model=str(model_folder)), torch.float16)
    assert found.is_described
    for name, value in found.network.state_dict().items():
        assert torch.equal(value, held[name].half()), name
    buffers = {name: buffer.dtype for name, buffer in found.network.named_buffers()}
    assert set(buffers.values()) == {torch.float32}, "rotary frequencies are kept as they were loaded"
