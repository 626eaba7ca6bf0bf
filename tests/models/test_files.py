"""Hostile model folders: no index, no configuration and no adapter reaches an unpickler."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from damage import ask, edit, refused, train
from safetensors.torch import load_file

from stillroom.models import LoadedModel

# -- pickles ---------------------------------------------------------------------------------------------


class Trap:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path that appears when a pickle was read. torch's reader is watched as well: it must not even be asked."""

    def never(*_arguments: Any, **_options: Any) -> Any:
        (tmp_path / "sprung").mkdir()

    monkeypatch.setattr(torch, "load", never)
    return tmp_path / "sprung"


def set_trap(path: Path, trap: Path) -> None:
    path.write_bytes(pickle.dumps({"lm_head.weight": Trap(trap)}))


@pytest.mark.parametrize("how", [ask, train])
@pytest.mark.parametrize("shard", ["../outside.bin", "outside.bin", "/absolute.bin", "a/../../outside.safetensors"])
def test_an_index_reaches_nothing_but_safetensors_of_its_folder(
    model_folder: Path, trap: Path, shard: str, how: Callable[[Path], LoadedModel]
) -> None:
    for place in (
        model_folder / "outside.bin",
        model_folder.parent / "outside.bin",
        model_folder.parent / "outside.safetensors",
    ):
        set_trap(place, trap)
    names = list(load_file(model_folder / "model.safetensors"))
    (model_folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, shard)}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refused(model_folder, shard, how=how)
    assert not trap.exists()


@pytest.mark.parametrize("how", [ask, train])
@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "model.pt"]
)
def test_pickled_weights_are_refused_by_name(
    model_folder: Path, trap: Path, name: str, how: Callable[[Path], LoadedModel]
) -> None:
    """A student folder with pickled weights alone is not one without weights: it must not begin at random."""
    (model_folder / "model.safetensors").unlink()
    set_trap(model_folder / name, trap)
    assert refused(model_folder, name, "pickle", how=how)
    assert not trap.exists()


def test_pickles_beside_safetensors_are_left_alone(model_folder: Path, trap: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "spk_dict.pt"):
        set_trap(model_folder / name, trap)
    assert ask(model_folder).is_described and not trap.exists()


def test_a_configuration_cannot_name_its_weights(model_folder: Path, trap: Path) -> None:
    set_trap(model_folder / "adapter_model.bin", trap)
    edit(model_folder, transformers_weights="adapter_model.bin")
    assert refused(model_folder, "adapter_model.bin")
    assert not trap.exists()


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": 7}']
)
def test_a_broken_index_is_refused(model_folder: Path, index: str) -> None:
    (model_folder / "model.safetensors").unlink()
    (model_folder / "model.safetensors.index.json").write_text(index)
    assert refused(model_folder, "model.safetensors.index.json")


def test_shards_that_are_not_there_are_named(model_folder: Path, tmp_path: Path) -> None:
    ask(model_folder).network.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    tiny.tokenizer().save_pretrained(tmp_path / "shards")
    lost = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    lost.unlink()
    assert refused(tmp_path / "shards", lost.name)


# -- adapters --------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An adapter folder, and in the place of peft what says that it was asked: it is an optional part."""
    module = ModuleType("peft")
    merged = SimpleNamespace(merge_and_unload=lambda: None)

    class PeftModel:
        @staticmethod
        def from_pretrained(model: Any, _path: str) -> Any:
            merged.merge_and_unload = lambda: model
            return merged

    module.PeftModel = PeftModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft", module)
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model_folder)}))
    (path / "adapter_model.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes())
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("how", [ask, train])
def test_an_adapter_is_merged_into_its_base(
    adapter: Path, model_folder: Path, how: Callable[[Path], LoadedModel]
) -> None:
    found = how(adapter)
    assert torch.equal(found.head.weight, load_file(model_folder / "model.safetensors")["lm_head.weight"])
    assert any(str(model_folder) in note for note in found.notes)


def test_a_pickled_adapter_is_refused(adapter: Path, trap: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    set_trap(adapter / "adapter_model.bin", trap)
    assert refused(adapter, "adapter_model.bin", "pickle")
    assert not trap.exists()


def test_a_pickled_base_of_an_adapter_is_refused(adapter: Path, model_folder: Path, trap: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    set_trap(model_folder / "pytorch_model.bin", trap)
    assert refused(adapter, "pytorch_model.bin", "pickle")
    assert not trap.exists()


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"base_model_name_or_path": 3}'])
def test_an_adapter_without_a_base_is_refused(adapter: Path, config: str) -> None:
    (adapter / "adapter_config.json").write_text(config)
    assert refused(adapter, "adapter_config.json")
