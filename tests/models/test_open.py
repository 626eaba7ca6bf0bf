"""Adapter folders as models, with peft itself: merged, trainable, and refused where a merge would be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from refusals import refused
from transformers import AutoModelForCausalLM

from stillroom.config.schema import StudentConfig, TeacherConfig
from stillroom.core.errors import BrokenAtStart
from stillroom.models.load import load_student, load_teacher

IDS = torch.arange(3, 27).view(2, 12)


def adapter_folder(folder: Path, *, is_tied: bool, **settings: Any) -> tuple[Path, torch.Tensor]:
    """A folder that peft wrote, and the answers of the model with the adapter beside it."""
    config = tiny.config("llama", width=32)
    config.tie_word_embeddings = is_tied
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "base")
    adapted = get_peft_model(model, LoraConfig(r=4, **settings))
    for part in adapted.parameters():
        if part.requires_grad:
            part.data += 0.1 * torch.randn_like(part)
    adapted.save_pretrained(folder / "adapter")
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(folder / "base")}))
    with torch.no_grad():
        return folder / "adapter", adapted.eval()(IDS).logits


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("use_dora", [False, True])
def test_a_merged_folder_answers_like_its_adapter_as_teacher_and_as_student(
    tmp_path: Path, is_tied: bool, use_dora: bool
) -> None:
    path, expected = adapter_folder(tmp_path, is_tied=is_tied, target_modules=["q_proj", "up_proj"], use_dora=use_dora)
    teacher, notes = load_teacher(TeacherConfig(model=str(path)), torch.float32)
    student, _ = load_student(StudentConfig(model=str(path)), seed=0)
    assert any("is an adapter, merged into" in note for note in notes)
    for model in (teacher, student.eval()):
        with torch.no_grad():
            assert torch.allclose(model(IDS).logits, expected, atol=1e-4)
    assert not any(part.requires_grad for part in teacher.parameters())
    assert all(part.requires_grad for part in student.parameters()), "a student's start is trained whole"


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_on_a_tied_head_is_refused(tmp_path: Path, target: str) -> None:
    path, _expected = adapter_folder(tmp_path, is_tied=True, target_modules=[target])
    for load in (
        lambda: load_teacher(TeacherConfig(model=str(path)), torch.float32),
        lambda: load_student(StudentConfig(model=str(path)), seed=0),
    ):
        with refused(BrokenAtStart, "", target, "tied"):
            load()


def test_an_adapter_on_a_head_of_its_own_is_merged(tmp_path: Path) -> None:
    path, expected = adapter_folder(tmp_path, is_tied=False, target_modules=["lm_head"])
    teacher, _notes = load_teacher(TeacherConfig(model=str(path)), torch.float32)
    with torch.no_grad():
        assert torch.allclose(teacher(IDS).logits, expected, atol=1e-4)
