"""Laws of layers taken out of a model, over the families of transformers whose layers are not all alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from refusals import refused
from torch import Tensor
from transformers import AutoModelForCausalLM

from stillroom.config import load_config
from stillroom.config.schema import ShrinkConfig
from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch
from stillroom.models.anatomy import layers_of
from stillroom.models.shrink.cut import cut
from stillroom.models.shrink.width import find_period
from stillroom.models.student import attend_causally
from stillroom.training.distill import distill

TOKENS = {"vocab_size": tiny.VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
STATE = {**TOKENS, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4}
SIZE = {
    **TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
WHOLE_HEADS = {**SIZE, "num_key_value_heads": 4}
WITHOUT_NUMBER = {key: value for key, value in SIZE.items() if key != "num_hidden_layers"}
SCAN = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
JAMBA = {"num_experts": 4, "mamba_d_state": 4, "mamba_d_conv": 2, "use_mamba_kernels": False}
RWKV = {"context_length": 128, "intermediate_size": 64, "hidden_size": 32, "vocab_size": tiny.VOCAB}
LINEAR = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "mamba_num_heads": 8, "head_dim": 8,
    "mamba_head_dim": 8, "ssm_state_size": 4, "n_groups": 1, "chunk_size": 8, "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip
ZAMBA = {
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 4, "n_mamba_heads": 8,
    "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1, "use_mamba_kernels": False,
}  # fmt: skip
NANO = {
    **WINDOWS, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "head_dim": 8,
    "vocab_size_per_layer_input": tiny.VOCAB, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip


def made(name: str, **settings: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**settings)


FAMILIES: dict[str, Callable[[], Any]] = {
    "mamba": made("MambaConfig", **STATE),
    "mamba2": made("Mamba2Config", **STATE, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    "falcon_mamba": made("FalconMambaConfig", **STATE),
    "rwkv": made("RwkvConfig", **RWKV, num_hidden_layers=4),
    "rwkv_deep": made("RwkvConfig", **RWKV, num_hidden_layers=8),
    "jamba": made(
        "JambaConfig", **SIZE, **JAMBA, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1,
    ),
    "bamba": made("BambaConfig", **SIZE, **SCAN, attn_layer_indices=[1, 3]),
    "falcon_h1": made("FalconH1Config", **SIZE, **{**SCAN, "mamba_n_heads": 4}, mamba_d_ssm=32),
    "granitemoehybrid": made(
        "GraniteMoeHybridConfig", **SIZE, **SCAN, **LOCAL, layer_types=["mamba", "attention"] * 2,
        shared_intermediate_size=32,
    ),
    "nemotron_h": made("NemotronHConfig", **WITHOUT_NUMBER, **EXPERTS, **NEMOTRON),
    "zamba2": made("Zamba2Config", **WHOLE_HEADS, **ZAMBA),
    "recurrent_gemma": made("RecurrentGemmaConfig", **SIZE, lru_width=32, attention_window_size=8),
    "lfm2": made("Lfm2Config", **SIZE, full_attn_idxs=[1, 3]),
    "qwen3_next": made(
        "Qwen3NextConfig", **SIZE, **EXPERTS, **LINEAR, num_experts=4, shared_expert_intermediate_size=32, head_dim=8
    ),
    "gpt_oss": made("GptOssConfig", **SIZE, **LOCAL, head_dim=8, sliding_window=4),
    "llama4": made(
        "Llama4TextConfig", **SIZE, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=64, head_dim=8,
        interleave_moe_layer_step=2, attention_chunk_size=4,
    ),
    "gpt_neo": made(
        "GPTNeoConfig", vocab_size=tiny.VOCAB, hidden_size=32, num_layers=4, num_heads=4, window_size=4,
        attention_types=[[["global", "local"], 2]], max_position_embeddings=128, bos_token_id=0, eos_token_id=0,
    ),
    "gemma3": made("Gemma3TextConfig", **SIZE, **WINDOWS, head_dim=8),
    "gemma3n": made("Gemma3nTextConfig", **SIZE, **NANO),
    "cohere2": made("Cohere2Config", **SIZE, **WINDOWS),
    "smollm3": made("SmolLM3Config", **SIZE, no_rope_layer_interval=2),
    "qwen2": made("Qwen2Config", **SIZE, use_sliding_window=True, sliding_window=4, max_window_layers=2),
    "qwen3_moe": made("Qwen3MoeConfig", **SIZE, **EXPERTS, head_dim=8, num_experts=4, decoder_sparse_step=2),
    "afmoe": made(
        "AfmoeConfig", **SIZE, **EXPERTS, head_dim=8, num_experts=4, num_shared_experts=1, num_dense_layers=1,
        global_attn_every_n_layers=2, sliding_window=4,
    ),
    "minimax": made(
        "MiniMaxConfig", **SIZE, **LOCAL, head_dim=8, block_size=8,
        layer_types=["full_attention", "linear_attention"] * 2,
    ),
    "ernie": lambda: tiny.config("ernie", num_layers=4),
    "deepseek_v3": lambda: tiny.config("deepseek_v3", num_layers=4),
    "bloom": made("BloomConfig", vocab_size=tiny.VOCAB, hidden_size=32, n_layer=4, n_head=4),
}  # fmt: skip

# Which layers a family cannot be cut to: kinds that no configuration of it says, layers that only the first can be,
# tensors that a layer shares with another, and a student that no longer has any attention and cannot generate.
REFUSED = {
    "jamba": (0, 2),
    "bamba": (0, 2),
    "lfm2": (0, 2),
    "qwen3_next": (0, 2),
    "granitemoehybrid": (0, 2),
    "nemotron_h": (0, 1, 3),
    "zamba2": (1, 2, 3),
    "gemma3n": (0, 2),
    "rwkv": (1, 2, 3),
    "rwkv_deep": (1, 2, 3),
    "minimax": (1, 2, 3),
}


def teacher_of(family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]()).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    attend_causally(model)
    return model.eval()


IDS = torch.randint(2, tiny.VOCAB, (2, 16), generator=torch.Generator().manual_seed(3))


def batches() -> list[Batch]:
    targets = torch.cat([IDS[:, 1:], torch.full_like(IDS[:, :1], -100)], dim=1)
    return [Batch(IDS, torch.ones_like(IDS), targets, torch.zeros_like(IDS), ("a", "b"))]


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(IDS).logits
    return found


def without(teacher: Any, kept: tuple[int, ...]) -> Tensor:
    """The teacher's logits when every other layer is computed and then ignored."""

    def ignore(_module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        return (given, *output[1:]) if isinstance(output, tuple) else given

    handles = [
        block.register_forward_hook(ignore, with_kwargs=True)
        for number, block in enumerate(layers_of(teacher))
        if number not in kept
    ]
    found = logits(teacher)
    for handle in handles:
        handle.remove()
    return found


def check_cut(teacher: Any, student: Any, kept: tuple[int, ...], folder: Path) -> None:
    student.save_pretrained(folder)
    again = logits(AutoModelForCausalLM.from_pretrained(folder))
    torch.testing.assert_close(again, logits(student), rtol=0, atol=1e-5)
    expected = without(teacher, kept)
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-4 * float(expected.std()) + 1e-5)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"rwkv_deep"}))
def test_a_cut_that_keeps_all_layers_of_any_family_is_the_teacher(family: str) -> None:
    teacher = teacher_of(family)
    assert torch.equal(logits(cut(teacher, ShrinkConfig()).model), logits(teacher))


def test_weights_that_a_family_rescales_while_it_evaluates_are_cut_as_they_were(tmp_path: Path) -> None:
    teacher = teacher_of("rwkv_deep")
    expected = without(teacher, (0, 5, 7))
    student = cut(teacher, ShrinkConfig(layers=(0, 5, 7))).model
    check_cut(teacher, student, (0, 5, 7), tmp_path)
    torch.testing.assert_close(without(teacher, (0, 5, 7)), expected)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("kept", [(0, 2), (1, 2, 3), (0, 1, 3)], ids=str)
def test_a_cut_of_any_family_is_the_teacher_without_those_layers_or_is_refused(
    family: str, kept: tuple[int, ...], tmp_path: Path
) -> None:
    teacher = teacher_of(family)
    student, refusal = None, ""
    try:
        student = cut(teacher, ShrinkConfig(layers=kept)).model
    except ConfigError as error:
        refusal = str(error)
    if student is None:
        assert teacher.config.model_type in refusal and "try:" in refusal
        assert family in REFUSED, f"{family} can be cut: {refusal}"
    else:
        check_cut(teacher, student, kept, tmp_path)


@pytest.mark.parametrize(("family", "kept"), REFUSED.items())
def test_what_a_family_cannot_be_cut_to_is_refused_by_name(family: str, kept: tuple[int, ...]) -> None:
    teacher = teacher_of(family)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        cut(teacher, ShrinkConfig(layers=kept))
    assert f"the family {teacher.config.model_type}" in caught.value.what and caught.value.advice
    assert caught.value.exit_code == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


@pytest.mark.parametrize("method", ["loss", "influence"])
@pytest.mark.parametrize("family", ["rwkv", "llama4", "recurrent_gemma", "gpt_oss", "mamba", "afmoe", "gemma3"])
def test_layers_are_chosen_among_those_that_the_family_can_be_cut_to(family: str, method: Any, tmp_path: Path) -> None:
    teacher = teacher_of(family)
    found = cut(teacher, ShrinkConfig(layers=2, method=method), batches())
    assert len(found.kept_layers) == 2 and found.choice.method == method
    check_cut(teacher, found.model, found.kept_layers, tmp_path)


@pytest.mark.parametrize("method", ["loss", "influence"])
def test_a_family_none_of_whose_layers_can_go_is_refused_by_name(method: Any) -> None:
    with refused(ConfigError, "student.shrink", "gemma3n_text"):
        cut(teacher_of("gemma3n"), ShrinkConfig(layers=2, method=method), batches())


def test_a_choice_leaves_a_pattern_that_the_configuration_can_say(tmp_path: Path) -> None:
    teacher = teacher_of("jamba")
    found = cut(teacher, ShrinkConfig(layers=3, method="loss"), batches())
    assert found.kept_layers in ((0, 1, 2), (1, 2, 3)), "a layer from the middle would end the period"
    check_cut(teacher, found.model, found.kept_layers, tmp_path)


def test_a_period_says_exactly_which_layers_are_marked() -> None:
    for period in range(1, 6):
        for offset in range(period):
            marks = [place % period == offset for place in range(9)]
            found = find_period(marks)
            assert found is not None
            assert [place % found[0] == found[1] for place in range(9)] == marks
    assert find_period([True, True, False]) is None
    assert find_period([False, False]) == (3, 2)


def test_a_run_cuts_a_state_space_teacher_and_leaves_an_ordinary_student(tmp_path: Path) -> None:
    folder = tmp_path / "world"
    teacher_of("mamba").save_pretrained(folder / "teacher")
    tiny.tokenizer().save_pretrained(folder / "teacher")
    tiny.save_text(folder / "train.jsonl", 80)
    over = {**tiny.settings(folder), "student.model": "builtin:student", "student.init": "shrink"}
    over |= {"student.shrink.layers": 3, "train.max_steps": 2, "eval.max_batches": 1}
    result = distill(load_config(overrides=over), tmp_path / "run", device="cpu")
    assert result.summary["student"]["perplexity"] < result.summary["student_before"]["perplexity"]
    student = AutoModelForCausalLM.from_pretrained(result.folder / "student")
    assert type(student).__name__ == "MambaForCausalLM" and len(layers_of(student)) == 3
