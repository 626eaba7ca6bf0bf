"""Read a model's configuration, and refuse one that is not a causal language model."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
)

from stillroom.config.schema import ModelSection
from stillroom.errors import BrokenAtStart
from stillroom.models.gguf import gguf_config, read_header
from stillroom.models.load.files import read_json
from stillroom.models.load.source import Source, runs_code

_IMPLEMENTATIONS = (
    "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "grouped_mm", "batched_mm",
)  # fmt: skip
# What a network has so many objects of; the deepest models have some hundreds.
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_local_experts", "num_experts",
           "n_routed_experts", "moe_num_experts", "block_count", "expert_count")  # fmt: skip
_MOST = 2000
_SENSES = ("vision_config", "audio_config", "vision_encoder_config", "speech_config")


def read_config(section: ModelSection, source: Source) -> Any:
    """Read the configuration of a causal language model. Raise with what the model is instead."""
    if source.is_gguf:
        _check_size(source, {key.rpartition(".")[2]: value for key, value in read_header(source.folder).fields.items()})
        described = gguf_config(source.folder)
        _check_kind(source, described)
        return described
    table = read_json(source, "config.json")
    _check_size(source, table)
    kind = table.get("model_type")
    if not isinstance(kind, str):
        raise _without_kind(source, table)
    _check_kernels(source, table)
    may_run = runs_code(section, source)
    brings_code = may_run and "AutoModelForCausalLM" in (table.get("auto_map") or {})
    if kind not in CONFIG_MAPPING and not brings_code:
        raise _unknown(source, kind, table)
    config = AutoConfig.from_pretrained(source.path, trust_remote_code=may_run)
    if not brings_code:
        _check_kind(source, config)
    if not may_run and hasattr(config, "auto_map"):
        del config.auto_map  # so that no network is made of code, whoever makes it
    return config


def _check_kernels(source: Source, table: Any) -> None:
    """Refuse an implementation that is not one of transformers' own: it takes other names for kernels to download."""
    if isinstance(table, list):
        for value in table:
            _check_kernels(source, value)
    if not isinstance(table, dict):
        return
    for key, value in table.items():
        if key.removesuffix("_internal").endswith(("attn_implementation", "experts_implementation")):
            names = value.values() if isinstance(value, dict) else (value,)
            strange = [name for name in names if name is not None and name not in _IMPLEMENTATIONS]
            if strange:
                raise BrokenAtStart(
                    f"config.json of {source.name} names an implementation that is not known: {key} = {strange[0]!r}",
                    advice=[f"remove it from config.json, or name one of {', '.join(_IMPLEMENTATIONS)}"],
                )
        _check_kernels(source, value)


def _check_size(source: Source, table: dict[str, Any]) -> None:
    """Raise for a number of layers or experts that no model has: building so many objects would take hours."""
    inner = [part for part in table.values() if isinstance(part, dict)]  # the text part of a larger model
    for part in (table, *inner):
        for key in _COUNTS:
            value = part.get(key)
            if isinstance(value, int | float) and value > _MOST:
                raise BrokenAtStart(
                    f"{source.name} has {key} = {str(value)[:12]}, and at most {_MOST:,} are built",
                    advice=["get the file again, from a place you trust"],
                )


def _without_kind(source: Source, table: dict[str, Any]) -> BrokenAtStart:
    if (source.folder / "events.jsonl").is_file():
        return BrokenAtStart(
            f"{source.name} is the folder of a run, not of a model",
            advice=[f"give the student in it: {source.folder / 'student'}"],
        )
    return BrokenAtStart(
        f"config.json of {source.name} names no model_type",
        advice=["check that it is the configuration of a transformers model"],
    )


def _unknown(source: Source, kind: str, table: dict[str, Any]) -> BrokenAtStart:
    advice = [f"pip install -U transformers: {transformers.__version__} is installed"]
    if table.get("auto_map"):
        advice.append(
            "it brings code of its own: read it, then name its hub id with trust_remote_code = true and a revision"
        )
    return BrokenAtStart(f"{source.name} is a {kind!r}, which this transformers does not know", advice=advice)


def _check_kind(source: Source, config: Any) -> None:
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise BrokenAtStart(
            f"{source.name} is an encoder-decoder model ({kind}): this version distils causal language models only",
            advice=["use a decoder-only model"],
        )
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or any(getattr(config, name, None) for name in _SENSES):
        raise BrokenAtStart(
            f"{source.name} is a vision-language or audio model ({kind}): this version distils text-only causal "
            "language models",
            advice=[_text_part(config), "use a text-only model of the same family"],
        )
    raise BrokenAtStart(
        f"{source.name} is a {kind}, which has no causal language model in transformers {transformers.__version__}",
        advice=["use a model that AutoModelForCausalLM can load"],
    )


def _text_part(config: Any) -> str:
    """Advice about the text part of a multimodal model."""
    try:
        text = config.get_text_config()
    except ValueError:  # several text parts
        return "it has several text parts, none of which can be used by itself"
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return (
            f"its text part is a {text.model_type}: load the model with transformers, put its language model and head "
            f"into a {MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__name__} and save that as a folder"
        )
    return f"its text part ({text.model_type}) has no causal class of its own in transformers"
