"""Laws of GGUF files: read back they give the logits that were written, or they are refused."""

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
from refusals import refused
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl_templates import template

from stillroom.core.errors import CannotSave, ConfigError
from stillroom.export.folder import export
from stillroom.export.gguf import interleaved, read_back

GROUPED = {"num_key_value_heads": 2, "tie_word_embeddings": False}
FAMILIES = [
    ("llama", GROUPED),
    ("llama", {**GROUPED, "tie_word_embeddings": True}),
    ("mistral", {**GROUPED, "sliding_window": None}),
    ("qwen2", GROUPED),
    ("qwen3", GROUPED),
    ("qwen2_moe", {**GROUPED, "norm_topk_prob": False}),
    ("qwen3_moe", {**GROUPED, "norm_topk_prob": True}),
    ("mixtral", {**GROUPED, "sliding_window": None}),
    ("mixtral", {"num_key_value_heads": 4, "tie_word_embeddings": True, "sliding_window": None}),
    ("olmoe", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
]


def save(folder: Path, family: str, settings: dict[str, Any], tokenizer: Any = None) -> Path:
    model = families.build(family, **settings)
    model.save_pretrained(folder)
    (tokenizer or begun.byte_tokenizer(chat_template=template("llama3"))).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("form", ["float32", "float16"])
def test_a_file_read_back_gives_the_same_logits(family: str, settings: Any, form: str, tmp_path: Path) -> None:
    source = save(tmp_path / "model", family, settings)
    done = export(str(source), tmp_path / "out", format="gguf", form=form)
    assert done.largest < 1e-3 and (tmp_path / "out" / f"model-{form}.gguf").is_file()
    assert done.rounded_largest < (1e-6 if form == "float32" else 0.2)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral"])
def test_eight_bits_are_written_in_blocks(family: str, tmp_path: Path, capsys: Any) -> None:
    source = save(
        tmp_path / "model", family, {**GROUPED, **({"norm_topk_prob": True} if family == "qwen3_moe" else {})}
    )
    words = ["--format", "gguf", "--gguf-type", "q8_0", "--json"]
    said = json.loads(output(capsys, "export", str(source), "--out", str(tmp_path / "out"), *words))
    assert said["largest"] < 1e-3 and 0 < said["rounded_kl"] < 0.1
    kinds = {t.tensor_type.name for t in library.GGUFReader(tmp_path / "out" / "model-q8_0.gguf").tensors}
    assert kinds == {"F32", "Q8_0"}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_queries_that_are_not_permuted_would_be_noticed(family: str, tmp_path: Path, monkeypatch: Any) -> None:
    source = save(tmp_path / "model", family, GROUPED)
    monkeypatch.setattr("stillroom.export.gguf.interleaved", lambda weight, _heads: weight)
    with pytest.raises(CannotSave):
        export(str(source), tmp_path / "out", format="gguf")
    assert not (tmp_path / "out").exists()
    rows = torch.arange(8.0)[:, None]
    assert interleaved(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, family: str, share: float) -> None:
    source = save(tmp_path / "model", family, GROUPED)
    export(str(source), tmp_path / "out", format="gguf")
    path = tmp_path / "out" / "model-float16.gguf"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with refused(CannotSave, "model-float16.gguf"):
        read_back(path, AutoConfig.from_pretrained(source))


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("gpt2", {}, "a gpt2 is not written as GGUF"),
        ("granitemoe", {}, "a granitemoe is not written as GGUF"),
        ("olmoe", {"num_key_value_heads": 4, "norm_topk_prob": True}, "are normalised, as llama.cpp does not"),
        ("olmoe", {"num_key_value_heads": 4, "clip_qkv": 8.0}, "it clips queries"),
        ("olmoe", {"num_key_value_heads": 2}, "fewer keys than queries"),
        ("llama", {"attention_bias": True}, "has no place in the file"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
        ("qwen3_moe", {"norm_topk_prob": False}, "not normalised"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "its rotary embedding is scaled",
        ),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(
    family: str, settings: Any, told: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "model", family, settings)
    with pytest.raises(ConfigError, match=told) as caught:
        export(str(source), tmp_path / "out", format="gguf")
    assert any("--format hf" in advice for advice in caught.value.advice)


@pytest.mark.parametrize("kind", ["byte", "llama"])
def test_the_tokenizer_in_the_file_reads_texts_alike(kind: str, tmp_path: Path) -> None:
    tokenizer = begun.byte_tokenizer(chat_template=template("llama3")) if kind == "byte" else begun.llama_tokenizer()
    source = save(tmp_path / "model", "llama", GROUPED, tokenizer)
    done = export(str(source), tmp_path / "out", format="gguf")
    again = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model-float16.gguf")
    for text in ("the still room keeps spirits", "how slowly it must drip"):
        ours, theirs = (words(text, add_special_tokens=False)["input_ids"] for words in (again, tokenizer))
        assert ours == theirs
    fields = library.GGUFReader(tmp_path / "out" / "model-float16.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == ("gpt2" if kind == "byte" else "llama")
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_token_id
    assert len(fields["tokenizer.ggml.tokens"].contents()) == AutoConfig.from_pretrained(source).vocab_size
    assert ("tokenizer.chat_template" in fields) == (kind == "byte")
    assert not done.notes


def test_without_the_extra_it_says_one_line(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    source = save(tmp_path / "model", "llama", GROUPED)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    code, _out, err = run(capsys, "export", str(source), "--out", str(tmp_path / "out"), "--format", "gguf")
    assert code == 2 and "pip install 'stillroom[gguf]'" in err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", GROUPED),
        ("mixtral", {**GROUPED, "sliding_window": None}),
        ("olmoe", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
        ("qwen2_moe", {**GROUPED, "norm_topk_prob": False}),
        ("qwen3_moe", {**GROUPED, "norm_topk_prob": True, "head_dim": 16}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_llama_cpp_itself_gives_the_same_answers(family: str, settings: Any, tmp_path: Path) -> None:
    """Where xllamacpp is installed, which brings llama.cpp: not a dependency."""
    llama = pytest.importorskip("xllamacpp")
    source = save(tmp_path / "model", family, {"hidden_size": 64, "intermediate_size": 128, **settings})
    export(str(source), tmp_path / "out", format="gguf", form="float32")
    options = llama.CommonParams()
    options.model.path = str(tmp_path / "out" / "model-float32.gguf")
    options.n_ctx, options.n_parallel, options.warmup, options.cpuparams.n_threads = 128, 1, False, 1
    prompt = list(range(20, 60, 3))
    asked = {"prompt": prompt, "n_predict": 4, "temperature": 0.0, "n_probs": 5, "cache_prompt": False}
    steps = llama.Server(options).handle_completions(asked)["choices"][0]["logprobs"]["content"]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for step in steps:
        with torch.no_grad():
            log_probs = torch.log_softmax(model(torch.tensor([prompt]), use_cache=False).logits[0, -1], -1)
        assert int(log_probs.argmax()) == step["id"]
        for found in step["top_logprobs"]:
            assert found["logprob"] == pytest.approx(float(log_probs[found["id"]]), abs=5e-3)
        prompt.append(step["id"])
    assert steps
