"""The models: are the folders whole, what are they, and do they fit into memory and onto the disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open

from stillroom.checks.doctor.finding import Finding, check
from stillroom.checks.doctor.setup import Setup
from stillroom.engine.building.models import Models
from stillroom.errors import BrokenAtStart, StillroomError
from stillroom.models import find
from stillroom.models.length import num_positions
from stillroom.models.load.files import check_adapter_files, check_weight_files
from stillroom.models.load.source import Source
from stillroom.models.routers import describe, find_gates
from stillroom.objectives.clamps import Clamps
from stillroom.precision import bytes_per_parameter
from stillroom.precision.resolve import choose
from stillroom.teachers.quantised import quantised_bytes
from stillroom.teachers.spec import teacher_dtype

SUBJECT = "models"
_TIGHT = 0.8  # of the free memory, before any activation


@check(SUBJECT)
def files(setup: Setup) -> Iterator[Finding]:
    """Raises for a folder whose weights are not there or not ours to read."""
    for role, source in setup.part("sources").items():
        if role == "student" and not _reads_weights(setup, source):
            continue
        if role == "teacher" and setup.config.teacher.server:
            continue  # its folder is there for the tokenizer
        if source.is_adapter:
            check_adapter_files(source)
        if source.is_adapter or source.is_gguf:
            continue
        is_here = find(source.name).is_local  # the weights of a hub model are fetched when it is loaded
        names = check_weight_files(source) if is_here else []
        kinds = sorted({kind for name in names for kind in _dtypes(source, name)})
        if role == "teacher" and "BF16" in kinds and teacher_dtype(setup.config, setup.device) == torch.float16:
            yield Finding(
                "amber",
                SUBJECT,
                f"the teacher {source.name} was saved in bfloat16 and is read in float16, where large activations "
                "overflow",
                "--set teacher.dtype=float32, or --set teacher.dtype=bfloat16",
            )


def _reads_weights(setup: Setup, source: Source) -> bool:
    init = setup.config.student.init
    return init == "pretrained" or (init == "auto" and source.has_weights)


def _dtypes(source: Source, name: str) -> set[str]:
    try:
        with safe_open(source.folder / name, framework="pt") as tensors:
            return {str(tensors.get_slice(key).get_dtype()) for key in tensors.keys()}  # noqa: SIM118 - not a dict
    except Exception as error:  # safetensors raises its own class, and OSError
        raise BrokenAtStart(
            f"{source.folder / name} is damaged: {error}", advice=["copy or download the file again"]
        ) from error


@check(SUBJECT)
def tried(setup: Setup) -> Iterator[Finding]:
    """Load both and run each on a few tokens; raises for one that is not finite, not causal or too small."""
    models: Models = setup.part("models")
    for role, loaded in (("teacher", models.loaded_teacher), ("student", models.loaded_student)):
        if loaded is None:
            continue
        facts = loaded.anatomy
        size = f"{facts.num_parameters:,} parameters, {facts.num_layers} layers, {facts.vocab_rows:,} tokens"
        yield Finding("green", SUBJECT, f"{role}: {type(loaded.network).__name__}, {size}")
        if not loaded.is_described:
            yield Finding(
                "amber",
                SUBJECT,
                f"the {role}'s head is none that can be described: its own logits are kept, [tokens, vocabulary]",
                "--set train.batch_size=1 if memory runs out, or a model of a common family",
            )
        yield from _length(setup, role, loaded.network)
    yield from _gates(setup, models)
    for note in Clamps(setup.config.guard.logit_clamp, setup.config.guard.loss_clamp).check(models.vocab_size):
        yield Finding("amber", SUBJECT, note, "--set guard.logit_clamp=0 --set guard.loss_clamp=0")
    yield from _sizes(models)


def _length(setup: Setup, role: str, network: Any) -> Iterator[Finding]:
    limit, asked = num_positions(network), setup.config.data.max_length
    if limit is not None and asked > limit:
        yield Finding(
            "red",
            SUBJECT,
            f"data.max_length {asked:,} is more than the {limit:,} positions of the {role}",
            f"--set data.max_length={limit}",
        )


def _gates(setup: Setup, models: Models) -> Iterator[Finding]:
    router = setup.config.teacher.router
    if models.teacher is None:
        return
    try:
        gates = find_gates(models.teacher, router.patterns)
    except StillroomError:
        if router.mode != "frozen":
            raise
        return  # a dense teacher
    yield Finding("green", SUBJECT, f"gates of the teacher: {describe(gates)}; teacher.router.mode is {router.mode}")


def _sizes(models: Models) -> Iterator[Finding]:
    if models.loaded_teacher is None:
        return
    large, small = (one.anatomy.num_parameters for one in (models.loaded_teacher, models.loaded_student))
    if small > large:
        yield Finding(
            "amber",
            SUBJECT,
            f"the student has {small:,} parameters and the teacher {large:,}: the larger one learns from the smaller",
            "exchange --teacher and --student, if that is not meant",
        )


@check(SUBJECT)
def memory(setup: Setup) -> Iterator[Finding]:
    models: Models = setup.part("models")
    config, machine = setup.config, setup.machine
    own = list(models.student.parameters())
    trained = sum(one.numel() for one in own if one.requires_grad)
    frozen = sum(one.numel() * one.element_size() for one in own if not one.requires_grad)
    mode, _reason = choose(config.precision.mode, machine.device, trained)
    each = bytes_per_parameter(mode, config.precision.moments, accumulates=config.train.gradient_accumulation_steps > 1)
    teacher = 0
    if models.teacher is not None and config.teacher.placement in ("device", "shard"):
        teacher = quantised_bytes(models.teacher, config.teacher.quantisation)
    on_device = trained * each.on_device + frozen + teacher
    yield from _room(on_device, machine.free_device_memory, machine.device.name)
    on_disk = trained * ((each.weights + each.extra + each.moments + each.best) * (config.checkpoint.keep + 1) + 8)
    if on_disk > machine.free_disk:
        yield Finding(
            "red",
            SUBJECT,
            f"checkpoints take {on_disk / 1e9:.1f} GB, and {machine.free_disk / 1e9:.1f} GB are free on the disk of "
            f"{setup.disk_folder}",
            "--set checkpoint.keep=1, or give --out a folder on another disk",
        )


def _room(needed: int, free: int, name: str) -> Iterator[Finding]:
    what = f"weights, moments and gradients take {needed / 1e9:.2f} GB of {free / 1e9:.2f} GB that are free on {name}"
    to_try = "--set precision.mode=fp16-split, --set teacher.placement=offload, or stillroom cache and teacher.cache"
    if needed > free:
        yield Finding("red", SUBJECT, what, to_try)
    elif needed > _TIGHT * free:
        yield Finding("amber", SUBJECT, f"{what}: little is left for activations", to_try)
    else:
        yield Finding("green", SUBJECT, what)
