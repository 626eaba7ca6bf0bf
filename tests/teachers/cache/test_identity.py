"""Laws of a teacher's identity: what changes its answers changes it, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from stillroom.config.schema import TeacherConfig
from stillroom.models.files import teacher_identity


def of(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, object]:
    return teacher_identity(TeacherConfig(model=str(folder)), dtype)


def test_a_copy_that_is_cut_into_other_files_is_the_same_teacher(model_folder: Path) -> None:
    before = of(model_folder)
    whole = load_file(model_folder / "model.safetensors")
    names = sorted(whole)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: whole[name] for name in held}, model_folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (model_folder / "model.safetensors").unlink()
    assert of(model_folder) == before


def test_one_changed_weight_one_setting_or_another_dtype_make_another(model_folder: Path) -> None:
    before = of(model_folder)
    assert of(model_folder, torch.float16) == {**before, "dtype": "float16"}
    told = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps({**told, "rms_norm_eps": 0.1}))
    assert {key for key, value in of(model_folder).items() if value != before[key]} == {"config"}
    (model_folder / "config.json").write_text(json.dumps({**told, "transformers_version": "9.9"}))
    assert of(model_folder) == before
    weights = load_file(model_folder / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1.0
    save_file(weights, model_folder / "model.safetensors", metadata={"format": "pt"})
    assert {key for key, value in of(model_folder).items() if value != before[key]} == {"weights"}
