"""Every file in examples/ runs from end to end on tiny models of the families it names, in a dry run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pair_tokenizers
import pytest
import tiny
from transformers import AutoConfig, AutoModelForCausalLM

import stillroom
from stillroom.config import load
from stillroom.config.load import shortened

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
sys.path.insert(0, str(ROOT / "benchmarks" / "plan"))
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip


def save_small(name: str, folder: Path, tokenizer: Any) -> Path:
    """A random model of the family that an example names."""
    from examples import SHAPES

    family, kind, sizes = SHAPES[name]
    used = {key: value for key, value in SMALL.items() if key in sizes or not key.startswith(("head", "num_exp"))}
    config = AutoConfig.for_model(family, **{**sizes, **used, "vocab_size": len(tokenizer) + 16}, architectures=[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_data(spec: str, folder: Path) -> str:
    """Records of the shape that the example's comment shows."""
    lines = tiny.sentences(60, seed=3)
    records: list[dict[str, Any]] = [{"text": line} for line in lines]
    if spec == "chats.jsonl":
        turns = ("user", "assistant")
        records = [{"messages": [{"role": role, "content": line} for role in turns]} for line in lines]
    elif spec in ("questions.jsonl", "articles.jsonl"):
        records = [{"prompt": f"{line} Answer:", "completion": " the"} for line in lines]
    path = folder / spec
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_on_small_models_of_its_families(path: Path, tmp_path: Path) -> None:
    given = load(path).config
    own = tiny.tokenizer()
    own.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    other = pair_tokenizers.byte_level() if "gemma" in given.teacher.model else own
    over: dict[str, Any] = {"teacher.model": str(save_small(given.teacher.model, tmp_path / "teacher", other))}
    if given.student.init != "shrink":
        over["student.model"] = str(save_small(given.student.model, tmp_path / "student", own))
    else:
        over["student.shrink.layers"] = 2
    over |= {"data.train": write_data(str(given.data.train), tmp_path), "data.max_length": 64, "eval.samples": 1}
    over |= {"eval.sample_tokens": 4, "train.batch_size": 2, "train.gradient_accumulation_steps": 2}
    if path.stem == "summarisation":
        over |= {"rollouts.max_new_tokens": 8}
    config = shortened(load(path, overrides=over)).config
    if path.stem == "moe-teacher-cached":  # as its first lines say
        stillroom.write_cache(config, tmp_path / "answers", device="cpu")
        config = shortened(load(path, overrides={**over, "teacher.cache": str(tmp_path / "answers")})).config
    result = stillroom.distill(config, tmp_path / "run", device="cpu")
    assert result.summary["steps"] == 5 and result.summary["success_rate"] == 1.0


def test_each_example_is_on_the_page_and_in_the_result_file() -> None:
    page = (ROOT / "docs" / "guides" / "examples.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "benchmarks" / "plan" / "results" / "examples.json").read_text())["rows"]
    assert len(EXAMPLES) == len(rows) == 7
    for path in EXAMPLES:
        assert f"examples/{path.name}" in page and rows[path.stem]["fits"]
        assert {rows[path.stem]["teacher.model"]} == {load(path).config.teacher.model}
