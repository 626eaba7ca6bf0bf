"""Load models and tokenizers from a folder, a hub id, an adapter folder, or a builtin name.

Safetensors only, and no code from a model repository unless the user pinned it. A weight that the file lacks would be
random, so it is an error. Any failure of a loader becomes one error with the model's name and advice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillroom.config.schema import ModelSection, StudentConfig, TeacherConfig
from stillroom.errors import BrokenAtStart, foreign_errors
from stillroom.models.adapter.patterns import check_patterns
from stillroom.models.adapter.targets import tied_layers
from stillroom.models.gguf import gguf_network, gguf_tokenizer
from stillroom.models.load.files import (
    COMPLETE,
    check_adapter_files,
    check_weight_files,
    coded_weights,
    fetch_base,
    read_json,
)
from stillroom.models.load.kinds import read_config
from stillroom.models.load.quiet import quiet_transformers
from stillroom.models.load.source import Source, fetch, one_line, runs_code
from stillroom.models.load.tokenizer_trial import try_tokenizer

# Masks, positions and rotary tables that older versions of transformers saved with the weights; the model computes
# them. `attn.bias` is a mask: real biases of an attention carry the names of its projections.
CONSTANTS = re.compile(
    r"(inv_freq|position_ids|masked_bias|(attn|attention)\.bias|causal_mask|(cos|sin)_cached|embed_positions\.weights)$"
)
_NAMED = 4  # names shown of a longer list


@contextmanager
def explained(name: str, part: str) -> Iterator[None]:
    """Convert any error of a loader to ours, with its cause and advice.

    Damaged files raise a dozen classes of several libraries, so catch them all.
    """

    def unusable(error: BaseException) -> BrokenAtStart:
        return BrokenAtStart(
            f"cannot use the {part} of {name}: {one_line(error)}",
            where=type(error).__name__,
            advice=["install the package it asks for"] if isinstance(error, ImportError) else [COMPLETE],
        )

    with foreign_errors(unusable), quiet_transformers():
        yield


def load_tokenizer(section: ModelSection, name: str) -> Any:
    source = fetch(section, name, weights=False)
    if not source.has_tokenizer:
        raise BrokenAtStart(
            f"{name} has no tokenizer", advice=["copy the tokenizer's files of the same model into the folder"]
        )
    if source.is_gguf or (source.folder / "config.json").exists():
        _read_config(section, source)  # the tokenizer's loader reads it too: report its errors first
    with explained(name, "tokenizer"):
        tokenizer = _tokenizer(section, source)
        if not tokenizer.get_vocab():
            raise BrokenAtStart(f"the tokenizer of {name} has no tokens", advice=["get its files again"])
        try_tokenizer(tokenizer, name)
        return tokenizer


def _tokenizer(section: ModelSection, source: Source) -> Any:
    if source.is_gguf:
        return gguf_tokenizer(source.folder)
    return AutoTokenizer.from_pretrained(source.path, trust_remote_code=runs_code(section, source))


def _read_config(section: ModelSection, source: Source) -> Any:
    with explained(source.name, "configuration"):
        return read_config(section, source)


def has_tokenizer(section: ModelSection, name: str) -> bool:
    """Whether the model's folder has a tokenizer."""
    return fetch(section, name, weights=False).has_tokenizer


def load_teacher(section: TeacherConfig, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """A model for inference, and notes about its files."""
    source = fetch(section, section.model, weights=True)
    with explained(section.model, "weights"):
        model, notes = _load(section, source, dtype)
    model.requires_grad_(False)
    model.eval()
    return model, notes


def load_student(section: StudentConfig, *, seed: int) -> tuple[Any, list[str]]:
    """The student in FP32, and notes, first where its weights come from. The precision policy casts it later."""
    init = section.init
    source = fetch(section, section.model, weights=init != "random")
    if init == "auto":
        init = "pretrained" if source.has_weights else "random"
    if init == "random":
        with explained(section.model, "configuration"):
            model = _draw(section, source, seed)
        notes = [f"student weights drawn at random (seed {seed}) from the configuration of {source.name}"]
    else:
        with explained(section.model, "weights"):
            model, notes = _load(section, source, torch.float32)
        if getattr(model, "is_quantized", False):
            raise BrokenAtStart(
                f"the weights of {source.name} are quantised and cannot be trained",
                advice=["use the model as it was before it was quantised"],
            )
        notes = [f"student weights loaded from {source.name}", *notes]
    ready_student(model, section)
    return model, notes


def _draw(section: StudentConfig, source: Source, seed: int) -> Any:
    config = _read_config(section, source)
    # The student's weights depend on the run's seed alone, not on earlier draws.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=runs_code(section, source))
    return model.float()


def ready_student(model: Any, section: StudentConfig) -> None:
    """Prepare a student for training."""
    if section.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    if getattr(model.config, "rescale_every", 0):
        # In evaluation mode RWKV halves weights of its later layers in place, against overflow in half precision: a
        # student saved after an evaluation would have other weights.
        model.config.rescale_every = 0


def _load(section: ModelSection, source: Source, dtype: torch.dtype) -> tuple[Any, list[str]]:
    if source.is_gguf:
        _read_config(section, source)  # report what is wrong with the file or its kind first
        model, report, notes = gguf_network(source.folder, dtype)
        return model, [*notes, *_check_keys(source, report)]
    load = _load_adapter if source.is_adapter else _load_weights
    model, notes = load(section, source, dtype)
    return model, [*([source.note] if source.note else []), *notes]


def _load_weights(section: ModelSection, source: Source, dtype: torch.dtype) -> tuple[Any, list[str]]:
    config = _read_config(section, source)
    files = check_weight_files(source)
    model, report = AutoModelForCausalLM.from_pretrained(
        source.path,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=runs_code(section, source),
        ignore_mismatched_sizes=True,  # not ignored: refused below with both sizes
        output_loading_info=True,
    )
    notes = _check_keys(source, report)
    if getattr(model, "is_quantized", False):
        return model, notes
    if getattr(config, "quantization_config", None) is not None:
        notes.append(f"{source.name}: the quantization_config of its config.json is not used")
    own = model.state_dict()
    coded = coded_weights(source, files, lambda name: name in own and own[name].is_floating_point())
    if coded:
        raise BrokenAtStart(
            f"the weights of {source.name} are stored as codes and its config.json does not say how to read them: "
            f"{_listed(coded)}",
            advice=["use the model as it was before it was quantised"],
        )
    return model, notes


def _check_keys(source: Source, report: dict[str, Any]) -> list[str]:
    """Refuse a file whose weights are not the model's. Return a note about constants that were ignored.

    The loader's report omits tied weights and those that transformers ignores for the family.
    """
    unexpected = sorted(report["unexpected_keys"])
    constants = [name for name in unexpected if CONSTANTS.search(name)]
    faults = {
        "misses": sorted(report["missing_keys"]),
        "has in another size": [
            f"{name} ({_shape(held)} in the file, {_shape(wanted)} in config.json)"
            for name, held, wanted in sorted(report["mismatched_keys"])
        ],
        "also holds, though the model has no such weight,": [name for name in unexpected if name not in constants],
    }
    problems = [f"{what} {_listed(names)}" for what, names in faults.items() if names]
    if problems:
        raise BrokenAtStart(
            f"the weights of {source.name} are not those of its config.json: the file {'; it '.join(problems)}",
            advice=[
                "check that config.json and the weights belong together, and that every file was copied whole",
                "a missing lm_head.weight of a model with tied embeddings: set tie_word_embeddings in config.json",
                "to train a student from scratch instead: --set student.init=random",
            ],
        )
    if not constants:
        return []
    return [f"{source.name}: the file holds constants that the model makes itself: {_listed(constants)}"]


def _shape(size: Any) -> str:
    return " x ".join(f"{number:,}" for number in size) or "scalar"


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest


def _load_adapter(section: ModelSection, source: Source, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """Load the base model of a LoRA adapter like any other model, and merge the adapter into it."""
    check_adapter_files(source)
    described = read_json(source, "adapter_config.json")
    base = fetch_base(section, source, weights=True)
    try:
        from peft import PeftModel
    except ImportError:
        raise BrokenAtStart(
            f"{source.name} is a LoRA adapter and needs peft", advice=["pip install 'stillroom[peft]'"]
        ) from None
    model, notes = _load_weights(TeacherConfig(), base, dtype)
    check_patterns(described, [part for part, _module in model.named_modules()], source.name)
    adapted = PeftModel.from_pretrained(model, source.path)
    tied = tied_layers(model)
    if tied:
        raise BrokenAtStart(
            f"{source.name} adapts {tied[0]}, whose weight is tied to another layer's: merged, it would change both",
            advice=["give a model with the adapter merged, saved with tie_word_embeddings = false"],
        )
    merged = adapted.merge_and_unload()
    merged.requires_grad_(True)  # peft froze what is now the whole model
    return merged, [f"{source.name} is an adapter, merged into {base.name}", *notes]
