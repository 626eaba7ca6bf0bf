"""What `stillroom plan` says of each file in examples/ for a T4: memory of the GPU, and the modelled seconds of a step.

    python benchmarks/plan/examples.py      # writes results/examples.json

Models are built from configurations with the published sizes and have no weights; nothing is read from a hub. The
sizes are those of the models' cards. No GPU was measured: time is a model of a T4 at the rates it sustains.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig

import stillroom
from stillroom.training.run_folder import machine, versions

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).with_name("results") / "examples.json"


def _sizes(width: int, inner: int, layers: int, heads: int, groups: int, tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": tokens, "tie_word_embeddings": True, **more,
    }  # fmt: skip


QWEN_SMALL = ("qwen2", "Qwen2ForCausalLM", _sizes(896, 4864, 24, 14, 2, 151_936))
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", "Qwen2ForCausalLM", _sizes(1536, 8960, 28, 12, 2, 151_936)),
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN_SMALL,
    "Qwen/Qwen2.5-Coder-0.5B": QWEN_SMALL,
    "meta-llama/Llama-3.2-3B-Instruct": (
        "llama", "LlamaForCausalLM", _sizes(3072, 8192, 28, 24, 8, 128_256, head_dim=128)),
    "meta-llama/Llama-3.2-1B-Instruct": (
        "llama", "LlamaForCausalLM", _sizes(2048, 8192, 16, 32, 8, 128_256, head_dim=64)),
    "allenai/OLMoE-1B-7B-0924": (
        "olmoe", "OlmoeForCausalLM",
        _sizes(2048, 1024, 16, 16, 16, 50_304, num_experts=64, num_experts_per_tok=8, tie_word_embeddings=False)),
    "allenai/OLMo-1B-hf": ("olmo", "OlmoForCausalLM", _sizes(2048, 8192, 16, 16, 16, 50_304)),
    "google/gemma-2-2b-it": ("gemma2", "Gemma2ForCausalLM", _sizes(2304, 9216, 26, 8, 4, 256_000, head_dim=256)),
    "HuggingFaceTB/SmolLM2-360M-Instruct": ("llama", "LlamaForCausalLM", _sizes(960, 2560, 32, 15, 5, 49_152)),
}  # fmt: skip


def main() -> None:
    rows = {}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {}
        for number, (name, (family, kind, sizes)) in enumerate(SHAPES.items()):
            folders[name] = Path(scratch) / str(number)
            AutoConfig.for_model(family, **sizes, architectures=[kind]).save_pretrained(folders[name])
        for path in sorted((ROOT / "examples").glob("*.toml")):
            given = stillroom.load_config(path)
            models = {"teacher.model": given.teacher.model, "student.model": given.student.model}
            local = {key: str(folders[name]) for key, name in models.items() if name in folders}
            plan = stillroom.plan(stillroom.load_config(path, overrides=local), gpu="T4", quick=True).to_dict()
            cost = plan["cost"]
            rows[path.stem] = {
                **models, "fits": plan["fits"], "gigabytes": plan["plan"]["total"] / 1e9, "mode": plan["precision"],
                "tokens_per_step": cost["tokens_per_step"], "seconds_per_step": cost["seconds_per_step"],
                "seconds_per_step_at_peak": cost["seconds_per_step_at_peak"], "notes": plan["notes"],
            }  # fmt: skip
            print(path.stem, json.dumps(rows[path.stem]), flush=True)
    content = {"gpu": "T4, modelled", "machine": machine(), "versions": versions(), "rows": rows}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
