"""Write a model as one GGUF file, for llama.cpp and what is built on it.

The names of tensors and settings are those of the `gguf` package. llama.cpp turns neighbouring pairs of a query or
key, transformers one half against the other: for the architecture `llama` the rows are permuted accordingly.
Architectures that were not read back and compared are refused by name.

# H heads, D width of a head, W width of the model, E experts
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from stillroom.core.errors import CannotSave, ConfigError
from stillroom.export.folder import Difference, Job, difference, logits_of, quality_of, refuse_changed
from stillroom.models.gguf import ARCHITECTURES, codes_of, in_halves, kept_codes, types_of
from stillroom.models.load import model_name
from stillroom.precision.blocks import FORMATS, RECIPES, decode, rounded

# -- gguf words ------------------------------------------------------------------------------------
# The tokenizer as metadata of a GGUF file: byte-level BPE, and BPE of SentencePiece's kind.


_SPACE = "\u2581"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
# How texts are split before merging: llama.cpp knows ways by name, not by pattern.
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace("{1,3}", ""): "qwen2"}


def add_words(writer: Any, library: Any, tokenizer: Any, num_rows: int, notes: list[str]) -> None:
    """Add vocabulary, merges, special tokens and chat template. Vocabularies are padded to the model's rows."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    record = json.loads(backend.to_str()) if backend is not None else {}
    model = record.get("model") or {}
    if model.get("type") != "BPE":
        kind = model.get("type") or type(tokenizer).__name__
        raise ConfigError(
            f"a tokenizer of the kind {kind} is not written as GGUF",
            where="--format gguf",
            advice=["--format hf writes every tokenizer"],
        )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    is_byte_level = "ByteLevel" in json.dumps(record.get("pre_tokenizer"))
    words, kinds = _vocabulary(library, tokenizer, model, record, num_rows)
    writer.add_tokenizer_model("gpt2" if is_byte_level else "llama")
    writer.add_tokenizer_pre(_split_name(record, notes) if is_byte_level else "default")
    writer.add_token_list(words)
    if not is_byte_level:
        writer.add_token_scores(_scores(words, merges))
        writer.add_add_space_prefix(_adds_space(tokenizer))
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    for role in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{role}_token_id", None)
        if number is not None:
            getattr(writer, f"add_{role}_token_id")(int(number))
    whole = list(tokenizer("a")["input_ids"])
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and whole[:1] == [tokenizer.bos_token_id])
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and whole[-1:] == [tokenizer.eos_token_id])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _vocabulary(
    library: Any, tokenizer: Any, model: Mapping[str, Any], record: Mapping[str, Any], num_rows: int
) -> tuple[list[str], list[int]]:
    """Each row of the model as a token and its kind."""
    kind = library.TokenType
    words = {number: word for word, number in tokenizer.get_vocab().items()}
    added = {entry["id"]: entry for entry in record.get("added_tokens") or ()}
    special = set(tokenizer.all_special_ids)
    tokens, kinds = [], []
    for number in range(max(num_rows, len(words))):
        word = words.get(number)
        tokens.append(word if word is not None else f"[PAD{number}]")
        if word is None:
            kinds.append(kind.UNUSED)
        elif number in added or number in special:
            is_control = number in special or added[number]["special"]
            is_unknown = number == tokenizer.unk_token_id and word == model.get("unk_token")
            kinds.append(kind.UNKNOWN if is_unknown else kind.CONTROL if is_control else kind.USER_DEFINED)
        elif model.get("byte_fallback") and len(word) == 6 and word.startswith("<0x"):
            kinds.append(kind.BYTE)
        else:
            kinds.append(kind.NORMAL)
    return tokens, [int(one) for one in kinds]


def _scores(words: Sequence[str], merges: Sequence[str]) -> list[float]:
    """llama.cpp merges the pair with the highest score: an earlier merge has a higher one."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks.get(word, len(merges))) for word in words]


def _adds_space(tokenizer: Any) -> bool:
    first = str(tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"][:1])[0])
    return first.startswith(_SPACE)


def _split_name(record: Mapping[str, Any], notes: list[str]) -> str:
    """The name llama.cpp has for this way of splitting; its default if it has none, with a note."""
    split = record.get("pre_tokenizer") or {}
    steps = split.get("pretokenizers") or [split]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    pattern = (steps[0].get("pattern") or {}).get("Regex") if kinds == ["Split", "ByteLevel"] else None
    if pattern in _SPLITS:
        return _SPLITS[pattern]
    notes.append("llama.cpp has no name for the way this tokenizer splits texts: its default is named, and may differ")
    return "default"


# -- gguf experts ----------------------------------------------------------------------------------
# Read back GGUF files of experts that transformers does not read: mixtral and olmoe.
#
# Sizes and weights come from the file alone, and names and the order of rows are turned round by separate rules,
# not by those of the writer: a mistake there must show as other logits.
#
# # H heads, D width of a head, W width of the model, E experts, F width of an expert


READ_HERE = ("mixtral", "olmoe")
_ROTATED_BY_PAIRS = ("mixtral",)  # written as llama, which rotates neighbouring channels
# setting of transformers: field of the file, behind the architecture's name
_FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "head_dim": "attention.key_length",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}


def read_network(library: Any, path: Path, family: str) -> Any:
    """The network of a file, in FP32. Raise ValueError or KeyError if the file does not hold all of it."""
    reader = library.GGUFReader(str(path))
    network = AutoModelForCausalLM.from_config(_config(reader, family)).float()
    weights = _weights(library, reader)
    state = {}
    for name, weight in weights.items():
        state.update(_expert_name(name, weight, weights, network.config, family))
    report = network.load_state_dict(state, strict=False)
    missing = [
        name for name in report.missing_keys if not (name == "lm_head.weight" and "output.weight" not in weights)
    ]
    if missing or report.unexpected_keys:
        raise ValueError(f"it lacks {missing} and has {list(report.unexpected_keys)} in addition")
    network.tie_weights()
    return network


def _config(reader: Any, family: str) -> Any:
    architecture = reader.fields["general.architecture"].contents()
    values = {key: reader.fields[f"{architecture}.{field}"].contents() for key, field in _FIELDS.items()}
    rope = {"rope_type": "default", "rope_theta": float(values.pop("rope_theta"))}
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    return AutoConfig.for_model(family, **values, rope_parameters=rope, tie_word_embeddings=is_tied)


def _weights(library: Any, reader: Any) -> dict[str, Tensor]:
    """Each tensor in FP32. The reader turns shapes round, as numpy has them; dequantising keeps them."""
    return {
        tensor.name: torch.from_numpy(
            np.array(library.quants.dequantize(tensor.data, tensor.tensor_type), np.float32, copy=True)
        ).reshape(tuple(int(size) for size in reversed(tensor.shape)))
        for tensor in reader.tensors
    }


def _expert_name(name: str, weight: Tensor, weights: dict[str, Tensor], config: Any, family: str) -> dict[str, Tensor]:
    """The parameter that a tensor is, by its name in transformers; of experts' gates and ups one of both."""
    stem = name.removesuffix(".weight")
    if stem in _WHOLE:
        return {f"{_WHOLE[stem]}.weight": weight}
    _blk, layer, part = stem.split(".", 2)
    before = f"model.layers.{layer}"
    if part in ("ffn_gate_exps", "ffn_up_exps"):
        halves = [weights[f"blk.{layer}.ffn_{half}_exps.weight"] for half in ("gate", "up")]
        return {f"{before}.mlp.experts.gate_up_proj": torch.cat(halves, 1)}  # [E, 2 F, W]
    if part == "ffn_down_exps":
        return {f"{before}.mlp.experts.down_proj": weight}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    if part in heads and family in _ROTATED_BY_PAIRS:
        weight = in_halves(weight, heads[part])
    return {f"{before}.{_OF_LAYER[part]}.weight": weight}


FORMS = ("float16", "float32", *RECIPES)
CLOSE = 1e-3  # of logits read back
_READ_WHOLE = ("llama", "mistral", "qwen2")  # transformers reads all their settings from the file


def write(job: Job) -> tuple[Difference, Difference]:
    """Write `model-FORM.gguf` with the tokenizer in it, read it back and compare."""
    library = _library()
    architecture = _architecture(job.network)
    tensors = list(_named(library, job.network, architecture))  # before rounding: refuse early
    del tensors
    if job.layers and job.form not in RECIPES:
        raise ConfigError("--layers goes with --quantise", where="--layers", advice=["add --quantise q4_0"])
    kinds = types_of(job.network, job.form, job.layers, where="--quantise")
    original = copy.deepcopy(job.network) if job.form in RECIPES else None
    # Codes are made once: llama.cpp's search may find others for weights that are rounded already.
    kept = kept_codes(Path(model_name(job.source.name)), job.notes)
    codes = {
        name: codes_of(weight, kinds[name], kept.get(name))
        for name, weight in job.network.named_parameters()
        if kinds[name] in FORMATS
    }
    expected, cost = job.rounded(
        lambda name, weight: decode(codes[name], kinds[name]) if name in codes else rounded(weight, kinds[name])
    )
    if original is not None:
        job.quality = quality_of(original, job.network, job.text)
        del original
    path = job.folder / f"model-{job.form}.gguf"
    writer = library.GGUFWriter(str(path), architecture)
    _add_settings(writer, job.network.config, architecture)
    if job.form in RECIPES:
        writer.add_file_type(library.LlamaFileType[f"MOSTLY_{job.form.upper()}"])
        writer.add_quantization_version(library.GGML_QUANT_VERSION)
    window = getattr(job.network.config, "sliding_window", None)
    if window and job.network.config.model_type in ("mistral", "mixtral"):
        job.notes.append(
            f"llama.cpp does not know its attention window: texts above {window:,} tokens are read otherwise"
        )
    add_words(writer, library, job.tokenizer, int(job.network.config.vocab_size), job.notes)
    for own, weight in job.network.named_parameters():
        job.kinds[kinds[own]] = job.kinds.get(kinds[own], 0) + weight.numel()
    for name, values, own in _named(library, job.network, architecture, codes):
        _add_tensor(writer, library, name, values, kinds[own])
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
    if kind not in ARCHITECTURES:
        raise _refused(f"a {kind} is not written as GGUF", f"families that are: {', '.join(ARCHITECTURES)}")
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
    return ARCHITECTURES[kind]


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


def _named(
    library: Any, network: Any, architecture: str, codes: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor, str]]:
    """(name in the file, weight or its codes, name in the network) of each parameter. Rows are moved whole."""
    config = network.config
    kinds = {name: kind for kind, name in library.MODEL_ARCH_NAMES.items()}
    names = library.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for own, parameter in network.named_parameters():
        weight = (codes or {}).get(own, parameter)
        if own.endswith(".experts.gate_up_proj"):
            layer = own.split(".")[2]
            for part, half in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                yield f"blk.{layer}.ffn_{part}_exps.weight", half, own
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
        yield f"{found}.{suffix}", weight, own


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of queries or keys, from two halves of a head to neighbouring pairs. [H D, W]"""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _add_tensor(writer: Any, library: Any, name: str, values: Tensor, kind: str) -> None:
    array = values.detach().contiguous().numpy()
    if kind in FORMATS:
        writer.add_tensor(name, array, raw_dtype=library.GGMLQuantizationType(FORMATS[kind].number))
    else:
        writer.add_tensor(name, array.astype(np.float16 if kind == "float16" else np.float32))
