"""Laws of experts dropped from a mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from test_cut import batches, ids, logits, teacher_of
from transformers import AutoModelForCausalLM

from stillroom.config.schema import ShrinkConfig
from stillroom.core.errors import ConfigError
from stillroom.models.routers import find_gates
from stillroom.models.shrink import cut as cutting
from stillroom.models.shrink.cut import cut
from stillroom.models.shrink.experts import choose_experts, without_experts
from stillroom.models.shrink.layer_choice import Bypass

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_is_the_teacher_whose_tokens_cannot_choose_the_other_experts(family: str, tmp_path: Path) -> None:
    teacher = teacher_of(family)
    student = cut(teacher, ShrinkConfig(experts=3, layers=(0, 2)), batches()).model
    gates, bypass = find_gates(teacher), Bypass(teacher)
    with torch.no_grad(), bypass.without({1, 3}):
        kept = choose_experts(teacher, gates, 3, batches())
        with without_experts(gates, kept):
            expected = teacher(ids(), use_cache=False).logits
    assert {len(experts) for experts in kept.values()} == {3} and {gate.num_experts for gate in gates} == {4}
    assert torch.allclose(logits(student), expected, atol=1e-4 * float(expected.std()))
    assert {gate.num_experts for gate in find_gates(student)} == {3}
    student.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(student))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_cut_that_keeps_all_experts_is_the_teacher(family: str) -> None:
    teacher = teacher_of(family)
    assert torch.equal(logits(cut(teacher, ShrinkConfig(experts=4), batches()).model), logits(teacher))


def test_an_expert_that_is_never_chosen_goes_first() -> None:
    teacher = teacher_of("mixtral")
    gates = find_gates(teacher)
    others = {gate.name: torch.tensor([one for one in range(4) if one != number]) for number, gate in enumerate(gates)}
    with without_experts(gates, others):  # of each layer another one
        kept = choose_experts(teacher, gates, 3, batches())
    assert [kept[name].tolist() for name in others] == [experts.tolist() for experts in others.values()]


@pytest.mark.parametrize(("family", "experts"), [("llama", 2), ("mixtral", 1), ("mixtral", 5)])
def test_experts_that_cannot_be_kept_are_refused(family: str, experts: int) -> None:
    with refused(ConfigError, "student.shrink.experts"):
        cut(teacher_of(family), ShrinkConfig(experts=experts), batches())


def test_experts_without_text_are_refused() -> None:
    with refused(ConfigError, "student.shrink.experts"):
        cut(teacher_of("mixtral"), ShrinkConfig(experts=3))


@pytest.mark.parametrize("family", ["dbrx", "ernie", "deepseek_v3"])
def test_a_family_whose_cut_differs_is_refused_by_name(family: str) -> None:
    with pytest.raises(ConfigError, match="of the family"):
        cut(teacher_of(family), ShrinkConfig(experts=3), batches())


def test_wrong_experts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = cutting.kept_rows

    def wrong(origin: str, tensor: Any, num_rows: int, kept: Any) -> Any:
        return own(origin, tensor, num_rows, {name: experts.flip(0) for name, experts in kept.items()}
                   if "experts." in origin else kept)  # fmt: skip

    monkeypatch.setattr(cutting, "kept_rows", wrong)
    with pytest.raises(ConfigError, match="logits differ"):
        cut(teacher_of("mixtral"), ShrinkConfig(experts=3), batches())
