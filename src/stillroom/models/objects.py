"""Models given as Python objects: check, fingerprint, save and copy them, without changing them.

A model is a `PreTrainedModel`, or a pair of one and its tokenizer. A student may be a `PeftModel` whose LoRA adapter is
not trained yet: its base is the student, and its settings are those of `student.adapter`.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from stillroom.core.errors import BrokenAtStart, CannotSave, ConfigError, StillroomError
from stillroom.core.files import is_disk_full, reason_of
from stillroom.models.load import LoadedModel, explained, load_teacher, load_tokenizer, quiet_transformers, try_model

EXPECTED = (
    "a name (folder, hub id or builtin:...), a transformers model for causal language, or a pair (model, tokenizer)"
)
# Configuration keys that do not change what the model computes.
_NOT_THE_MODEL = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache")
_HASHED_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class GivenModel:
    """A model object, with its tokenizer if one was given."""

    role: str
    network: Any
    tokenizer: Any = None
    adapter: dict[str, Any] = field(default_factory=dict)  # settings of `student.adapter`, from a PeftModel

    @property
    def name(self) -> str:
        return f"the {type(self.network).__name__} given as {self.role}"

    @classmethod
    def of(cls, value: object, role: str) -> GivenModel | None:
        """The model of an argument; None for a name. Raise if it is neither."""
        if isinstance(value, str | Path):
            return None
        network, tokenizer = value, None
        if isinstance(value, tuple | list):
            if len(value) != 2:
                raise _wrong(role, f"holds {len(value)} things, where a pair has a model and its tokenizer")
            network, tokenizer = value
            if not isinstance(tokenizer, PreTrainedTokenizerBase):
                raise _wrong(role, f"has a {type(tokenizer).__name__} in the place of its tokenizer")
        adapter: dict[str, Any] = {}
        if role == "student" and hasattr(network, "peft_config") and hasattr(network, "unload"):
            adapter = _fresh_lora(network)
            network = copy.deepcopy(network).unload().requires_grad_(True)
        if not isinstance(network, PreTrainedModel):
            raise _wrong(role, f"is a {type(network).__name__}", *_unwrap(network))
        model = cls(role, network, tokenizer, adapter)
        model._check()
        return model

    def _check(self) -> None:
        if getattr(self.network, "_hf_peft_config_loaded", False):
            raise _wrong(self.role, "has an adapter that is not merged", "merge it with peft: merge_and_unload()")
        if self.network.get_output_embeddings() is None:
            raise _wrong(self.role, f"is a {type(self.network).__name__}, which has no language-model head")
        if any(weight.is_meta for weight in self.network.parameters()):
            advice = "load it without a device map that puts weights on disk", "or give the name of its folder"
            raise _wrong(self.role, "has weights that are not in memory but on the meta device", *advice)

    def check_kept(self) -> list[str]:
        """Refuse an object that a saved and loaded copy would not equal. Return notes."""
        kind = type(self.network)
        classes = AutoModelForCausalLM._model_mapping.get(type(self.network.config), ())
        if kind not in (classes if isinstance(classes, tuple) else (classes,)):
            raise _wrong(
                self.role,
                f"is a {kind.__name__}, which AutoModelForCausalLM does not load from its configuration: a run "
                "works on a copy that it saves and loads",
                "give the name of its folder, with trust_remote_code and a revision where it needs its own code",
                "or make the class known: AutoModelForCausalLM.register(config_class, model_class)",
            )
        # accelerate wraps the forwards of a model it placed; `_is_changed` leaves those out.
        changed = [name for name, part in self.network.named_modules() if _is_changed(part)]
        if changed:
            raise _wrong(
                self.role,
                f"has its own forward in {changed[0] or kind.__name__}, which a saved copy does not have",
                "make it part of a class, and that class known to AutoModelForCausalLM",
            )
        return self._notes()

    def _notes(self) -> list[str]:
        hooked = [part for part in self.network.modules() if part._forward_hooks or part._forward_pre_hooks]
        notes = [f"{self.role}: hooks on {len(hooked):,} of its modules are not part of the run"] if hooked else []
        if self.role != "student":
            return notes
        frozen = [name for name, weight in self.network.named_parameters() if not weight.requires_grad]
        if not frozen:
            return notes
        if len(frozen) < len(list(self.network.parameters())):
            raise _wrong(
                self.role,
                f"has {len(frozen):,} weights that are frozen, {frozen[0]} among them: a run trains every weight",
                "allow it: student.requires_grad_(True)",
            )
        return [*notes, "student: all its weights are frozen, and its copy is trained nevertheless"]

    def fingerprint(self) -> str:
        """sha256 of the weights, the configuration and the tokenizer."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.network.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            flat = tensor.detach().reshape(-1)
            for begin in range(0, flat.numel(), _HASHED_ELEMENTS):
                part = flat[begin : begin + _HASHED_ELEMENTS].cpu().contiguous()
                digest.update(part.view(torch.uint8).numpy().tobytes())
        settings = {key: value for key, value in self.network.config.to_dict().items() if key not in _NOT_THE_MODEL}
        digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
        digest.update(_tokenizer_text(self.tokenizer).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the model, and the tokenizer if there is one, as a Hugging Face folder."""
        try:
            with quiet_transformers(), _config_kept(self.network):
                self.network.save_pretrained(folder)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
        except (StillroomError, MemoryError):
            raise
        except Exception as error:  # safetensors, tokenizers and quantisers raise their own classes
            if isinstance(error, OSError) or is_disk_full(error):
                raise CannotSave(
                    f"cannot write {self.name}: {reason_of(error)}",
                    where=str(folder),
                    advice=["free some space on that disk", f"or give {self.role} as the name of a folder"],
                ) from error
            raise BrokenAtStart(
                f"{self.name} cannot be written: {reason_of(error)}",
                where=type(error).__name__,
                advice=[f"write it with save_pretrained yourself and give {self.role} as the name of the folder"],
            ) from error

    def copied(self, tokenizer: Any) -> LoadedModel:
        """An FP32 copy for evaluation, tested like a loaded model."""
        if getattr(self.network, "is_quantized", False):
            raise _wrong(self.role, "is quantised and has no FP32 copy", "give the name of its folder")
        with explained(self.name, "network"):
            network = copy.deepcopy(self.network).float()
        network.requires_grad_(False)
        return try_model(network.eval(), tokenizer, name=self.name, role=self.role)


def reload(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder as a user would load them: FP32, evaluation mode, gradients enabled."""
    from stillroom.config.schema import TeacherConfig

    section = TeacherConfig(model=str(folder))
    model, _notes = load_teacher(section, torch.float32)
    return model.requires_grad_(True), load_tokenizer(section, section.model)


def _wrong(role: str, what: str, *advice: str) -> ConfigError:
    return ConfigError(f"{role} {what}", where=role, advice=[*advice, f"expected {EXPECTED}"])


# Fields of peft's LoraConfig in which another value than these is more than `student.adapter` can say.
_PLAIN_LORA: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "modules_to_save": (None,), "layers_to_transform": (None,), "exclude_modules": (None,),
    "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "use_rslora": (False,), "target_parameters": (None,),
    "layer_replication": (None,), "fan_in_fan_out": (False,),
}  # fmt: skip


def _fresh_lora(model: Any) -> dict[str, Any]:
    """The settings of `student.adapter` that equal a PeftModel's adapter. Raise if it is more than they say."""
    merged = "merge it: model.merge_and_unload()", "or give the base model and student.adapter in the settings"
    told, *others = model.peft_config.values()
    if others or getattr(told.peft_type, "value", told.peft_type) != "LORA":
        raise _wrong("student", "has several adapters, or one that is not LoRA", *merged)
    odd = [key for key, plain in _PLAIN_LORA.items() if getattr(told, key, plain[0]) not in plain]
    if odd or isinstance(told.target_modules, str):
        raise _wrong("student", f"has an adapter with {', '.join(odd) or 'a pattern as target_modules'}", *merged)
    trained = [key for key, value in model.named_parameters() if ".lora_B." in key and bool(value.detach().any())]
    if trained:
        raise _wrong("student", f"has an adapter that is trained already ({trained[0]} is not zero)", *merged)
    settings = {"rank": told.r, "alpha": float(told.lora_alpha), "dropout": told.lora_dropout}
    kind = "dora" if getattr(told, "use_dora", False) else "lora"
    return {**settings, "kind": kind, "targets": sorted(told.target_modules or ())}


def _unwrap(network: object) -> list[str]:
    """Advice for common wrappers of a model: what to pass instead."""
    if isinstance(network, type) and issubclass(network, PreTrainedModel):
        return ["that is the class: give a model of it"]
    for attribute in ("_orig_mod", "module"):
        if isinstance(getattr(network, attribute, None), PreTrainedModel):
            return [f"give the model inside: .{attribute}"]
    if hasattr(network, "merge_and_unload"):
        return ["merge the adapter: model.merge_and_unload()"]
    return []


def _is_changed(part: Any) -> bool:
    return "forward" in vars(part) and not hasattr(part, "_hf_hook")


def _tokenizer_text(tokenizer: Any) -> str:
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    spoken = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    marks = {name: str(mark) for name, mark in tokenizer.special_tokens_map.items()}
    return json.dumps([spoken, marks, str(tokenizer.chat_template)], sort_keys=True)


@contextmanager
def _config_kept(network: Any) -> Iterator[None]:
    """Restore the configuration after the body: `save_pretrained` writes its dtype and class into it."""
    settings = network.config.__dict__
    before = dict(settings)
    try:
        yield
    finally:
        settings.clear()
        settings.update(before)
