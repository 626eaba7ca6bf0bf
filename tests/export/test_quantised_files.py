"""Quantised GGUF files: formats as asked, read back to the last bit, and the loss told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import begun
import families
import gguf as library
import pytest
import torch
from commands import output, run
from transformers import AutoModelForCausalLM
from trl_templates import template

from stillroom.export.folder import export

HAS_LLAMA = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"
)


def save(folder: Path, **settings: Any) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2, "tie_word_embeddings": True}
    families.build("llama", **{**sizes, **settings}).save_pretrained(folder)
    begun.byte_tokenizer(chat_template=template("llama3")).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", ["q4_0", "q4_1", "q5_0", "q5_1"])
def test_a_file_of_blocks_gives_back_the_rounded_weights(form: str, tmp_path: Path, capsys: Any) -> None:
    source = save(tmp_path / "model")
    words = ["--out", str(tmp_path / "out"), "--format", "gguf", "--quantise", form, "--json"]
    said = json.loads(output(capsys, "export", str(source), *words))
    assert said["largest"] == 0.0 and said["quality"]["kl"] > 0
    assert set(said["weights"]) == {form, "q8_0", "float32"}
    kinds = {tensor.tensor_type.name for tensor in library.GGUFReader(tmp_path / "out" / f"model-{form}.gguf").tensors}
    assert kinds == {form.upper(), "Q8_0", "F32"}
    assert "perplexity" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@HAS_LLAMA
@pytest.mark.slow
@pytest.mark.parametrize("form", ["q4_0", "q4_k_m", "q5_k_m", "q6_k"])
def test_llama_cpp_writes_the_text_of_the_rounded_weights(form: str, tmp_path: Path) -> None:
    """Greedy, from a trained model: its logits are far apart, so rounding of activations decides little."""
    import xllamacpp

    done = export("builtin:teacher", tmp_path / "out", format="gguf", form=form)
    assert done.largest == 0.0 and done.tokens_per_second
    path = next((tmp_path / "out").glob("*.gguf"))
    network = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.warmup = str(path), 256, 1, False
    server, same = xllamacpp.Server(options), 0
    for first in range(10):
        prompt = list(range(20 + first, 60 + first, 3))
        asked = {"prompt": prompt, "n_predict": 64, "temperature": 0.0, "n_probs": 2, "ignore_eos": True}
        steps = server.handle_completions(asked)["choices"][0]["logprobs"]["content"]
        ids = torch.tensor([prompt])
        for step in steps:
            with torch.no_grad():
                logits = network(ids, use_cache=False).logits[0, -1]
            best = logits.topk(2)
            is_tie = float(best.values[0] - best.values[1]) < 0.5  # llama.cpp rounds activations to eight bits
            assert int(best.indices[0]) == step["id"] or (is_tie and int(best.indices[1]) == step["id"])
            same += int(best.indices[0]) == step["id"]
            ids = torch.cat([ids, torch.tensor([[step["id"]]])], 1)
    assert same > 0.9 * 640


def test_what_cannot_be_written_ends_with_2_and_what_to_do(tmp_path: Path, capsys: Any) -> None:
    source = save(tmp_path / "model", hidden_size=72, num_attention_heads=6)
    out = ["--out", str(tmp_path / "out"), "--format", "gguf"]
    for words in (
        ["--quantise", "q4_0"],  # rows of 72 are no whole blocks
        ["--quantise", "q3_x"],
        ["--quantise", "q4_0", "--layers", "lm_head=q8_0"],  # tied
        ["--quantise", "q4_0", "--layers", "down_proj"],
        ["--layers", "down_proj=q8_0"],
    ):
        code, _out, err = run(capsys, "export", str(source), *out, *words)
        assert code == 2 and "try" in err and not (tmp_path / "out").exists()
