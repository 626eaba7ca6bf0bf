"""Write a model as one GGUF file, for llama.cpp and what is built on it.

The names of tensors and settings are those of the `gguf` package. llama.cpp turns neighbouring pairs of a query or
key, transformers one half against the other: for the architecture `llama` the rows are permuted accordingly.
Architectures that were not read back and compared are refused by name.

# H heads, D width of a head, W width of the model, E experts
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from stillroom.errors import CannotSave, ConfigError
from stillroom.export.check import Difference, difference, logits_of, refuse_changed
from stillroom.export.folder import Job
from stillroom.export.gguf_experts import READ_HERE, read_network
from stillroom.export.gguf_words import add_words

FORMS = ("float16", "float32", "q8_0")
CLOSE = 1e-3  # of logits read back
_BLOCK = 32  # weights that share a scale in q8_0
# model_type of transformers: architecture of llama.cpp
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",  # with experts
    "olmoe": "olmoe",
}
_READ_WHOLE = ("llama", "mistral", "qwen2")  # transformers reads all their settings from the file
_ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")  # small, and llama.cpp keeps them in FP32


def write(job: Job) -> tuple[Difference, Difference]:
    """Write `model-FORM.gguf` with the tokenizer in it, read it back and compare."""
    library = _library()
    architecture = _architecture(job.network)
    tensors = list(_named(library, job.network, architecture))  # before rounding: refuse early
    del tensors
    expected, cost = job.rounded(lambda name, weight: _rounded(library, name, weight, job.form))
    path = job.folder / f"model-{job.form}.gguf"
    writer = library.GGUFWriter(str(path), architecture)
    _add_settings(writer, job.network.config, architecture)
    window = getattr(job.network.config, "sliding_window", None)
    if window and job.network.config.model_type in ("mistral", "mixtral"):
        job.notes.append(
            f"llama.cpp does not know its attention window: texts above {window:,} tokens are read otherwise"
        )
    add_words(writer, library, job.tokenizer, int(job.network.config.vocab_size), job.notes)
    for name, weight, is_wide in _named(library, job.network, architecture):
        _add_tensor(writer, library, name, weight, "float32" if is_wide else job.form, job.notes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    again = read_back(path, job.network.config)
    change = difference(expected, logits_of(again, job.rows))
    refuse_changed("the GGUF file", change, CLOSE)
    return change, cost


def read_back(path: Path, config: Any) -> Any:
    """The network of a GGUF file in FP32, loaded by transformers where it can. Refuse a file that is not whole."""
    library = _library()
    try:
        reader = library.GGUFReader(str(path))
        size = path.stat().st_size
        short = [tensor.name for tensor in reader.tensors if tensor.data_offset + tensor.n_bytes > size]
        if not reader.tensors or short:
            raise ValueError(f"{short[0]} is cut off" if short else "it holds no tensors")
        network = (
            read_network(library, path, config.model_type) if config.model_type in READ_HERE else _read(path, config)
        )
    except (ValueError, IndexError, KeyError, OSError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CannotSave(
            f"the GGUF file cannot be read back: {reason}",
            where=path.name,
            advice=["free some space on that disk and export again"],
        ) from error
    return network.eval()


def _read(path: Path, config: Any) -> Any:
    # Of some families transformers does not read all sizes; of the others nothing but the file is used.
    own = {"config": config} if config.model_type not in _READ_WHOLE else {}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
        return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32, **own)


def _library() -> Any:
    try:
        import gguf
    except ImportError:
        raise ConfigError(
            "GGUF files are written with the package gguf, which is not installed",
            where="--format gguf",
            advice=["pip install 'stillroom[gguf]'"],
        ) from None
    return gguf


def _architecture(network: Any) -> str:
    """The name llama.cpp has for this family. Refuse what it would compute otherwise, by name."""
    config = network.config
    kind = config.model_type
    if kind not in _ARCHITECTURES:
        raise _refused(f"a {kind} is not written as GGUF", f"families that are: {', '.join(_ARCHITECTURES)}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    sparse_steps = getattr(config, "decoder_sparse_step", 1), bool(getattr(config, "mlp_only_layers", None))
    problems = {
        f"its rotary embedding is scaled ({rope})": rope != "default",
        f"its activation is {config.hidden_act}": config.hidden_act != "silu",
        "it has dense layers between those of experts": sparse_steps not in ((1, False), (None, False)),
        "its expert weights are not normalised, as llama.cpp does": kind == "qwen3_moe" and not config.norm_topk_prob,
        "its expert weights are normalised, as llama.cpp does not": kind in ("qwen2_moe", "olmoe")
        and config.norm_topk_prob,
        "it clips queries, keys and values": getattr(config, "clip_qkv", None) is not None,
        "it has fewer keys than queries, and norms of both": kind == "olmoe"
        and config.num_key_value_heads != config.num_attention_heads,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise _refused(f"this {kind} is not written as GGUF: {problem}")
    return _ARCHITECTURES[kind]


def _refused(what: str, *advice: str) -> ConfigError:
    return ConfigError(what, where="--format gguf", advice=[*advice, "--format hf writes every family"])


def _add_settings(writer: Any, config: Any, architecture: str) -> None:
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_type("model")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_width)
    writer.add_value_length(head_width)
    writer.add_rope_dimension_count(head_width)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "num_experts", None):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture in ("qwen2moe", "qwen3moe"):  # the experts of the others are as wide as `feed_forward_length`
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _named(library: Any, network: Any, architecture: str) -> Iterator[tuple[str, Tensor, bool]]:
    """(name in the file, weight, whether it stays in FP32) of each parameter."""
    config = network.config
    kinds = {name: kind for kind, name in library.MODEL_ARCH_NAMES.items()}
    names = library.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for own, weight in network.named_parameters():
        is_wide = stays_wide(own, weight)
        if own.endswith(".experts.gate_up_proj"):
            layer = own.split(".")[2]
            for part, half in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                yield f"blk.{layer}.ffn_{part}_exps.weight", half, is_wide
            continue
        stem, _dot, suffix = own.rpartition(".") if own.endswith((".weight", ".bias")) else (own, ".", "weight")
        found = names.get_name(stem)
        if found is None or (suffix == "bias" and architecture == "llama"):
            raise _refused(f"this {config.model_type} is not written as GGUF: its {own} has no place in the file")
        projection = stem.rpartition(".")[2]
        if architecture == "llama" and projection in heads:
            weight = interleaved(weight, heads[projection])
        if own.endswith("shared_expert_gate.weight"):
            weight = weight.reshape(-1)
        yield f"{found}.{suffix}", weight, is_wide


def stays_wide(name: str, weight: Tensor) -> bool:
    return weight.ndim < 2 or name.endswith(_ROUTERS)


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of queries or keys, from two halves of a head to neighbouring pairs. [H D, W]"""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _form_of(form: str, weight: Tensor) -> str:
    """q8_0 takes rows of whole blocks; others are written in FP16."""
    return "float16" if form == "q8_0" and weight.shape[-1] % _BLOCK else form


def _rounded(library: Any, name: str, weight: Tensor, form: str) -> Tensor:
    """A weight as the file gives it back."""
    form = "float32" if stays_wide(name, weight) else _form_of(form, weight)
    if form == "float16":
        return weight.half().to(weight.dtype)
    if form == "q8_0":
        kind = library.GGMLQuantizationType.Q8_0
        values = library.quants.dequantize(library.quants.quantize(weight.detach().numpy(), kind), kind)
        return torch.from_numpy(np.ascontiguousarray(values)).reshape(weight.shape)
    return weight


def _add_tensor(writer: Any, library: Any, name: str, weight: Tensor, form: str, notes: list[str]) -> None:
    values = weight.detach().float().contiguous().numpy()
    own_form = _form_of(form, weight)
    if own_form != form:
        notes.append(f"{name} is written in float16: its rows are no whole blocks of {_BLOCK}")
    if own_form == "q8_0":
        kind = library.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, library.quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values.astype(np.float16 if own_form == "float16" else np.float32))
