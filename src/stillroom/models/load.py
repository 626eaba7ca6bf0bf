"""Models and tokenizers from a folder, a hub id, an adapter folder, or a builtin name.

Safetensors only, and no code from a model repository unless the user pinned it. Whatever goes wrong while
loading ends as one error that names the model and says what to try.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from stillroom import builtin
from stillroom.config.schema import ModelSection, StudentConfig, TeacherConfig
from stillroom.errors import BrokenAtStart, ConfigError
from stillroom.models.attention import attend_causally

# Progress bars and advice of the loader would interleave with our own log.
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


@dataclass(frozen=True)
class Source:
    """Where a model comes from, after builtin names are resolved."""

    name: str  # as the user wrote it
    path: str  # what the loader is given
    is_local: bool

    @property
    def is_adapter(self) -> bool:
        return self.is_local and (Path(self.path) / "adapter_config.json").exists()

    @property
    def has_weights(self) -> bool:
        if not self.is_local:
            return True
        return any(Path(self.path).glob("*.safetensors")) or any(Path(self.path).glob("*.safetensors.index.json"))


def find(name: str) -> Source:
    if name.startswith("builtin:"):
        short = name.removeprefix("builtin:")
        if short not in builtin.MODELS:
            near = difflib.get_close_matches(short, builtin.MODELS, n=1)
            raise ConfigError(
                f"there is no builtin model {short!r}",
                advice=[f"did you mean builtin:{known}?" for known in near]
                + ["builtin models: " + ", ".join(f"builtin:{known}" for known in builtin.MODELS)],
            )
        return Source(name, str(builtin.model_path(short)), is_local=True)
    path = Path(name).expanduser()
    if path.is_dir():
        return Source(name, str(path), is_local=True)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise BrokenAtStart(
            f"{name} is not a model folder",
            advice=["give the folder that holds config.json and the *.safetensors files, or a hub id like org/name"],
        )
    return Source(name, name, is_local=False)


@contextmanager
def _explained(source: Source, part: str) -> Iterator[None]:
    """Turn the loader's errors into one that says what to try."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        advice = (
            ["check that the folder is complete (config.json, tokenizer.json, model.safetensors)"]
            if source.is_local
            else [
                "check the spelling of the hub id and the network",
                "download it elsewhere and give the folder instead",
                "with HF_HUB_OFFLINE=1 only models already in the cache can be used",
            ]
        )
        raise BrokenAtStart(f"cannot load the {part} of {source.name}: {first_line}", advice=advice) from error


def load_tokenizer(section: ModelSection, name: str) -> Any:
    source = find(name)
    with _explained(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(
            source.path, revision=section.revision, trust_remote_code=section.trust_remote_code
        )


def has_tokenizer(name: str) -> bool:
    """Whether a local model folder brings its own tokenizer. Hub models are asked by loading."""
    source = find(name)
    return not source.is_local or any(
        (Path(source.path) / file).exists() for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    )


def load_teacher(section: TeacherConfig, dtype: torch.dtype) -> Any:
    source = find(section.model)
    with _explained(source, "weights"):
        model = _load_adapter(source, dtype) if source.is_adapter else _load_weights(section, source, dtype)
    model.requires_grad_(False)
    model.eval()
    attend_causally(model)
    return model


def load_student(section: StudentConfig, *, seed: int) -> tuple[Any, str]:
    """The student in FP32 and a sentence on where its weights come from. Precision policies cast it later."""
    source = find(section.model)
    init = section.init
    if init == "auto":
        init = "pretrained" if source.has_weights else "random"
    with _explained(source, "weights" if init == "pretrained" else "configuration"):
        if init == "random":
            config = AutoConfig.from_pretrained(
                source.path, revision=section.revision, trust_remote_code=section.trust_remote_code
            )
            # The student's weights depend on the run's seed alone, not on what was drawn before.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(config)
            model = model.float()
            why = f"student weights drawn at random (seed {seed}) from the configuration of {source.name}"
        else:
            model = _load_weights(section, source, torch.float32)
            why = f"student weights loaded from {source.name}"
    ready_student(model, section)
    return model, why


def ready_student(model: Any, section: StudentConfig) -> None:
    """What every student needs before it is trained, wherever its weights come from."""
    if section.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    attend_causally(model)


def _load_weights(section: ModelSection, source: Source, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        source.path,
        dtype=dtype,
        use_safetensors=True,
        revision=section.revision,
        trust_remote_code=section.trust_remote_code,
    )


def _load_adapter(source: Source, dtype: torch.dtype) -> Any:
    try:
        from peft import AutoPeftModelForCausalLM
    except ImportError:
        raise BrokenAtStart(
            f"{source.name} is a LoRA adapter and needs peft", advice=["pip install 'stillroom[peft]'"]
        ) from None
    return AutoPeftModelForCausalLM.from_pretrained(source.path, dtype=dtype).merge_and_unload()
