"""A network of the right shapes without weights, for counting bytes: call it under a `FakeTensorMode`.

Only the configuration is read, from a folder, a GGUF header, an adapter's base or a builtin name.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from stillroom.config.schema import ModelSection, ShrinkConfig, StudentConfig, TeacherConfig
from stillroom.core.errors import BrokenAtStart
from stillroom.models.files import fetch, fetch_base
from stillroom.models.load import explained, read_config, ready_student
from stillroom.models.shrink.width import config_of_layers
from stillroom.models.student import attend_causally


def described_model(section: ModelSection, name: str) -> tuple[Any, list[str]]:
    """The configuration of a model and notes. An adapter has that of its base, into which it is merged."""
    source = fetch(section, name, weights=False)
    notes = []
    if source.is_adapter:
        source = fetch_base(section, source, weights=False)
        section = TeacherConfig(model=source.name)
        notes.append(f"{name} is an adapter: counted as its base model {source.name}, into which it is merged")
    if source.is_gguf:
        notes.append(f"{name}: sizes are from the header of the GGUF file; its weights are unpacked when loaded")
    with explained(name, "configuration"):
        return read_config(section, source), notes


def teacher_shape(section: TeacherConfig, dtype: torch.dtype) -> tuple[Any, list[str]]:
    config, notes = described_model(section, section.model)
    network = _network(config, section, dtype)
    return network.eval().requires_grad_(False), notes


def student_shape(
    section: StudentConfig, teacher: TeacherConfig, *, recomputes: bool, is_open: bool = False
) -> tuple[Any, list[str]]:
    """The student in FP32, as it is loaded. `recomputes`: with checkpointed activations; `is_open`: attention that
    keeps its probabilities."""
    if section.init == "shrink":
        config, notes = described_model(teacher, teacher.model)
        config = _cut(config, section.shrink)
        notes.append("the student is cut from the teacher: its sizes are from the teacher's configuration")
    else:
        config, notes = described_model(section, section.model)
    if section.vocabulary == "teacher":
        rows = int(described_model(teacher, teacher.model)[0].get_text_config().vocab_size)
        config.get_text_config().vocab_size = rows
        notes.append(f"the student takes the teacher's vocabulary: counted with {rows:,} rows")
    network = _network(config, section, torch.float32, is_open=is_open)
    with explained(section.model, "configuration"):
        ready_student(network, section.model_copy(update={"gradient_checkpointing": recomputes}))
    return network.train(), notes


def _network(config: Any, section: ModelSection, dtype: torch.dtype, *, is_open: bool = False) -> Any:
    with explained(str(config.model_type), "configuration"), torch.random.fork_rng(devices=[]):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=section.trust_remote_code)
        network.tie_weights()
        if is_open:
            network.set_attn_implementation("eager")
        else:
            attend_causally(network)
    return network


def _cut(config: Any, shrink: ShrinkConfig) -> Any:
    """The configuration of a student cut from the teacher of this one."""
    text = config.get_text_config()
    num_layers = int(text.num_hidden_layers)
    kept = shrink.layers if isinstance(shrink.layers, tuple) else range(shrink.layers or num_layers)
    if kept and max(kept) >= num_layers:
        raise BrokenAtStart(
            f"student.shrink.layers asks for layer {max(kept)}, and the teacher has {num_layers}, counted from 0",
            where="student.shrink.layers",
            advice=[f"--set student.shrink.layers={num_layers}"],
        )
    new = config_of_layers(config, tuple(kept))
    text = new.get_text_config()
    for field, value in (
        ("hidden_size", shrink.width),
        ("intermediate_size", shrink.mlp_width),
        ("num_attention_heads", shrink.heads),
    ):
        if value:
            setattr(text, field, value)
    return new
