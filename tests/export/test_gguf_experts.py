"""Laws of the reader of experts' GGUF files: it uses the file alone, and refuses one that lacks a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import begun
import families
import gguf as library
import pytest
import torch

from stillroom.core.errors import CannotSave
from stillroom.export.folder import export
from stillroom.export.gguf import in_halves, interleaved, read_back, read_network

SETTINGS = {"num_key_value_heads": 4, "tie_word_embeddings": False, "rms_norm_eps": 3e-4}


@pytest.fixture(params=["mixtral", "olmoe"])
def written(request: Any, tmp_path: Path) -> tuple[Path, Any]:
    """A file and the model it was written from."""
    model = families.build(request.param, **SETTINGS)
    model.save_pretrained(tmp_path / "model")
    begun.byte_tokenizer().save_pretrained(tmp_path / "model")
    export(str(tmp_path / "model"), tmp_path / "out", format="gguf", form="float32")
    return tmp_path / "out" / "model-float32.gguf", model


def test_sizes_and_every_weight_come_from_the_file(written: tuple[Path, Any]) -> None:
    path, model = written
    again = read_network(library, path, model.config.model_type)
    for name in ("hidden_size", "num_experts_per_tok", "intermediate_size", "rms_norm_eps", "num_local_experts"):
        assert getattr(again.config, name) == pytest.approx(getattr(model.config, name)), name
    theirs = dict(again.named_parameters())
    assert theirs.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in model.named_parameters())


def test_a_file_that_lacks_a_tensor_is_refused(written: tuple[Path, Any], monkeypatch: Any) -> None:
    path, model = written
    whole = library.GGUFReader(str(path))

    class Short:
        fields = whole.fields
        tensors = [tensor for tensor in whole.tensors if tensor.name != "blk.1.attn_v.weight"]  # noqa: RUF012

    monkeypatch.setattr(library, "GGUFReader", lambda _path: Short())
    with pytest.raises(CannotSave, match=r"layers\.1\.self_attn\.v_proj"):
        read_back(path, model.config)


def test_rows_of_halves_and_of_pairs_are_each_other_s_inverse() -> None:
    weight = torch.randn(24, 5)
    assert torch.equal(in_halves(interleaved(weight, 3), 3), weight)
    assert in_halves(torch.arange(8.0)[:, None], 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
