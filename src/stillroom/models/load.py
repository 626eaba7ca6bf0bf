"""Load models and tokenizers from a folder, a hub id, an adapter folder or a builtin name, and test them before use.

Safetensors only, and no code from a model repository unless the user pinned it. A weight that the file lacks would be
random, so it is an error. Any failure of a loader becomes one error with the model's name and advice.

A model is run once on a few tokens: does an earlier output depend on a later token, does the described head give the
model's own logits, does maskless attention give the same outputs? Nothing is concluded from the name of its family.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import utils as hub_utils
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers.utils import logging

from stillroom.config.schema import ModelSection, ShrinkConfig, StudentConfig, TeacherConfig
from stillroom.core.errors import BrokenAtStart, foreign_errors
from stillroom.core.files import Stored, is_in_store, reason_of, write_atomically
from stillroom.core.machine import main_memory
from stillroom.core.remote import here
from stillroom.core.types import Detail, HeadWeights
from stillroom.losses.head.kernel import choose_folder
from stillroom.models.anatomy import (
    Anatomy,
    anatomy_of,
    backbone,
    check_rows,
    head_error,
    head_of,
    in_eval_mode,
    vocabulary_hash,
)
from stillroom.models.compile import CompiledBody
from stillroom.models.files import (
    COMPLETE,
    Source,
    check_adapter_files,
    check_patterns,
    check_weight_files,
    coded_weights,
    fetch,
    fetch_base,
    listed,
    one_line,
    read_json,
    runs_code,
    student_identity,
    teacher_identity,
)
from stillroom.models.gguf import gguf_config, gguf_network, gguf_tokenizer, packed_network, read_header
from stillroom.models.shrink.cut_budget import candidates
from stillroom.models.shrink.width import config_of_layers, shrink_config
from stillroom.models.student import NAME as CAUSAL_ATTENTION
from stillroom.models.student import Student, attend_causally, tie

# Masks, positions and rotary tables that older versions of transformers saved with the weights; the model computes
# them. `attn.bias` is a mask: real biases of an attention carry the names of its projections.
CONSTANTS = re.compile(
    r"(inv_freq|position_ids|masked_bias|(attn|attention)\.bias|causal_mask|(cos|sin)_cached|embed_positions\.weights)$"
)


@dataclass(frozen=True)
class LoadedModel:
    """A tested network with its tokenizer."""

    network: Any
    tokenizer: Any
    anatomy: Anatomy
    is_described: bool  # `head` gives the network's own logits; if False, use the network's logits
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # entries for the summary of a run

    @property
    def head(self) -> HeadWeights:
        """The network's head. Valid only if `is_described`."""
        return head_of(self.network)

    def as_student(
        self, vocab_size: int | None = None, compiled: CompiledBody | None = None, *, ties: bool = False
    ) -> Student:
        """The network as a student, over its own vocabulary or `vocab_size` ids shared with another model.

        `ties`: the gradients of a tied embedding and head are joined, where one process trains it.
        """
        size = vocab_size or self.anatomy.vocab_rows
        tied = tie(self.network) if ties and self.is_described else None
        return Student(self.network, vocab_size=size, is_described=self.is_described, compiled=compiled, tied=tied)


def open_teacher(section: TeacherConfig, dtype: torch.dtype, tokenizer: Any = None) -> LoadedModel:
    """Load a model for inference, with its tokenizer, and test it."""
    tokenizer = tokenizer or load_tokenizer(section, section.model)
    network, notes = load_teacher(section, dtype)
    memory = TrialMemory(lambda: {**teacher_identity(section, dtype), "role": "teacher"}, section)
    return try_model(network, tokenizer, name=section.model, role="teacher", notes=notes, memory=memory)


def open_student(
    section: StudentConfig,
    tokenizer: Any,
    *,
    seed: int,
    change: Callable[[Any], list[str]] = lambda _network: [],
) -> LoadedModel:
    """Load the student and test it. `change` is made before the test, and returns notes."""
    network, notes = load_student(section, seed=seed)
    notes += change(network)
    is_as_filed = section.init != "random" and section.vocabulary == "own"
    memory = TrialMemory(lambda: {**student_identity(section), "role": "student"}, section) if is_as_filed else None
    return try_model(network, tokenizer, name=section.model, role="student", notes=notes, memory=memory)


def load_tokenizer(section: ModelSection, name: str) -> Any:
    source = fetch(section, name, weights=False)
    if not source.has_tokenizer:
        raise BrokenAtStart(
            f"{name} has no tokenizer", advice=["copy the tokenizer's files of the same model into the folder"]
        )
    if source.is_gguf or (source.folder / "config.json").exists():
        read_config(section, source)  # the tokenizer's loader reads it too: report its errors first
    with explained(name, "tokenizer"):
        if source.is_gguf:
            tokenizer = gguf_tokenizer(source.folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=runs_code(section, source))
        if not tokenizer.get_vocab():
            raise BrokenAtStart(f"the tokenizer of {name} has no tokens", advice=["get its files again"])
        try_tokenizer(tokenizer, name)
        return tokenizer


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
        notes = [Detail(f"student weights loaded from {source.name}"), *notes]
    ready_student(model, section)
    return model, notes


def _draw(section: StudentConfig, source: Source, seed: int) -> Any:
    config = read_config(section, source)
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
        read_config(section, source)  # report what is wrong with the file or its kind first
        is_packed = isinstance(section, TeacherConfig) and section.quantisation == "file"
        model, report, notes = (packed_network if is_packed else gguf_network)(source.folder, dtype)
        return model, [*notes, *_check_keys(source, report)]
    load = _load_adapter if source.is_adapter else _load_weights
    model, notes = load(section, source, dtype)
    return model, [*([source.note] if source.note else []), *notes]


def _load_weights(section: ModelSection, source: Source, dtype: torch.dtype) -> tuple[Any, list[str]]:
    config = read_config(section, source)
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
            f"{listed(coded, 4)}",
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
    problems = [f"{what} {listed(names, 4)}" for what, names in faults.items() if names]
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
    return [f"{source.name}: the file holds constants that the model makes itself: {listed(constants, 4)}"]


def _shape(size: Any) -> str:
    return " x ".join(f"{number:,}" for number in size) or "scalar"


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


def tied_layers(network: Any) -> list[str]:
    """Layers of a network with an adapter whose frozen weight is also another layer's. They cannot be merged."""
    owners: dict[int, int] = {}
    for _name, parameter in network.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    found = []
    for name, module in network.named_modules():
        weight = getattr(getattr(module, "base_layer", None), "weight", None)
        if owners.get(id(weight), 0) > 1:
            found.append(name)
    return found


# -- the trial -------------------------------------------------------------------------------------------


_LENGTH = 24
_SEED = 20_240
_FREE_SHARE = 0.5
_REMEMBERED = 20_000_000  # parameters
_TRIAL_VERSION = 1  # of what a trial tests
# In standard deviations of the logits. FP32 outputs differ by the order of summation, half precision by rounding too.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 0.05


class _Trial(Stored):
    """What a trial found."""

    is_described: bool
    attends_causally: bool
    notes: list[str]


class TrialMemory:
    """The result of a trial in the user's cache, by the contents of the model's files and the versions that matter.

    `identity` hashes the files. A model of fewer than `_REMEMBERED` parameters is tried faster than it is looked up.
    One that brings its own code is tried at every start.
    """

    def __init__(self, identity: Callable[[], dict[str, Any]], section: ModelSection) -> None:
        self._identity, self._runs_code = identity, section.trust_remote_code
        self._path: Path | None = None

    def recall(self, network: Any, tokenizer: Any, notes: list[str]) -> _Trial | None:
        """The result of an earlier trial; None where there is none, or none that can be read, which is noted."""
        if self._runs_code or sum(weight.numel() for weight in network.parameters()) < _REMEMBERED:
            return None
        key = {
            **self._identity(),
            "tokens": vocabulary_hash(tokenizer),
            "dtype": str(network.get_output_embeddings().weight.dtype),
            "versions": [torch.__version__, transformers.__version__, _TRIAL_VERSION],
        }
        try:
            folder = choose_folder()[0]
        except OSError:
            return None
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode("utf-8")).hexdigest()
        self._path = folder / f"trial-{digest[:32]}.json"
        try:
            return _Trial.of(json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            notes.append(
                f"what is kept of an earlier trial cannot be read ({reason_of(error)}): the model is tried again"
            )
            return None

    def keep(self, trial: _Trial) -> None:
        if self._path is not None:
            with suppress(OSError):  # it is tried again at the next start
                write_atomically(self._path, trial.model_dump_json().encode("utf-8"))


def try_model(
    network: Any,
    tokenizer: Any,
    *,
    name: str,
    role: str,
    notes: Sequence[str] = (),
    memory: TrialMemory | None = None,
) -> LoadedModel:
    """Test a network on a few tokens; raise if it cannot be used. With `memory`, not if it was tested before.

    The random state, the weights and the mode of the network are restored.
    """
    all_notes = [*notes]
    known = memory.recall(network, tokenizer, all_notes) if memory is not None else None
    if known is not None:
        with explained(name, "network"):
            anatomy = anatomy_of(network)
            check_rows(tokenizer, anatomy.vocab_rows, int(network.get_input_embeddings().weight.shape[0]), name)
            if known.attends_causally:
                attend_causally(network)
        return LoadedModel(network, tokenizer, anatomy, known.is_described, (*notes, *known.notes))
    num_before = len(all_notes)
    with (
        explained(name, "network"),
        torch.random.fork_rng(devices=[]),
        in_eval_mode(network),
        _in_fp32(network, all_notes, role),
    ):
        anatomy = anatomy_of(network)
        _check_sizes(anatomy, name)
        check_rows(tokenizer, anatomy.vocab_rows, int(network.get_input_embeddings().weight.shape[0]), name)
        ids = _two_texts(network, tokenizer, anatomy)
        tolerance = _TOLERANCE.get(network.get_output_embeddings().weight.dtype, _HALF_TOLERANCE)
        own = _answers(network, ids, name)
        _check_causality(network, ids, own, tolerance, name)
        _choose_attention(network, ids, own, tolerance, all_notes, role)
        error = head_error(network, ids)
        if role == "student":
            _check_training(network, ids, name)
    is_described = error <= tolerance
    if not is_described:
        all_notes.append(
            f"the {role}'s head is not one we can describe (logits differ by {error:.2g} of their spread): "
            "its own logits are used, which keeps a [tokens, vocabulary] tensor"
        )
    if memory is not None:
        is_causal = network.config.get_text_config()._attn_implementation == CAUSAL_ATTENTION
        found = all_notes[num_before:]
        memory.keep(_Trial(is_described=is_described, attends_causally=is_causal, notes=found))
    return LoadedModel(network, tokenizer, anatomy, is_described, tuple(all_notes))


def _check_sizes(anatomy: Anatomy, name: str) -> None:
    sizes = {"layers": anatomy.num_layers, "width": anatomy.width, "vocabulary": anatomy.vocab_rows}
    wrong = {part: size for part, size in sizes.items() if size < 1}
    if wrong:
        listed = ", ".join(f"{part} {size:,}" for part, size in wrong.items())
        raise BrokenAtStart(f"{name} is of no size: {listed}", advice=["check its config.json"])


def _two_texts(network: Any, tokenizer: Any, anatomy: Anatomy) -> Tensor:
    """Two sequences of random ordinary tokens whose first halves are equal. [2, L]"""
    limit = int(getattr(network.config.get_text_config(), "max_position_embeddings", 0) or _LENGTH)
    length = max(2, min(_LENGTH, limit))
    special = set(tokenizer.all_special_ids) if tokenizer is not None else set()
    ids = tokenizer.get_vocab().values() if tokenizer is not None else range(anatomy.vocab_rows)
    ordinary = torch.tensor(sorted(set(ids) - special) or sorted(ids))
    generator = torch.Generator().manual_seed(_SEED)
    first, second = ordinary[torch.randint(len(ordinary), (2, length), generator=generator)]
    second[: length // 2] = first[: length // 2]
    # With a tiny vocabulary the second halves may be equal too: make the last token differ.
    second[-1] = ordinary[(int((ordinary == first[-1]).nonzero()[0]) + 1) % len(ordinary)]
    return torch.stack([first, second]).to(next(network.parameters()).device)


@torch.no_grad()
def _answers(network: Any, ids: Tensor, name: str) -> Tensor:
    logits: Tensor = network(input_ids=ids, use_cache=False).logits.float()
    if bool(torch.isfinite(logits).all()):
        return logits
    here = [(part, weight) for part, weight in network.named_parameters() if not weight.is_meta]
    broken = [part for part, weight in here if not bool(torch.isfinite(weight).all())]
    raise BrokenAtStart(
        f"{name} answers with values that are not finite"
        + (f"; not finite: {', '.join(broken[:4])}" if broken else ""),
        advice=not_finite_advice(network.get_output_embeddings().weight.dtype),
    )


def not_finite_advice(dtype: torch.dtype) -> list[str]:
    """What to try where a teacher's answers are not finite. FP32 helps one that is not in it."""
    is_whole = dtype in (torch.float32, torch.float64)
    return [*([] if is_whole else ["load it in float32: --set teacher.dtype=float32"]), "check the model folder"]


def _check_causality(network: Any, ids: Tensor, own: Tensor, tolerance: float, name: str) -> None:
    """Refuse a network whose earlier outputs depend on a later token: it would see its targets."""
    shared = ids.shape[1] // 2
    seen = own
    if float(own.std()) == 0.0:  # a head of zeros: compare hidden states
        with torch.no_grad():
            seen = backbone(network)(input_ids=ids, use_cache=False).last_hidden_state.float()
    change = _change(seen[0, :shared], seen[1, :shared])
    if change <= tolerance / 10:  # both are in one batch, so equal inputs hardly differ by rounding
        return
    if _change(_answers(network, ids, name), own) > tolerance / 10:
        raise BrokenAtStart(
            f"{name} does not answer the same text alike twice: it cannot be compared with anything",
            advice=["use a model that draws nothing at random in evaluation mode"],
        )
    raise BrokenAtStart(
        f"{name} is not causal: a later token changes its earlier answers by {change:.2g} of their spread, so it sees "
        "what it is asked to predict",
        where=type(network).__name__,
        advice=["use a decoder-only language model", "an encoder made to decode has is_decoder = true in config.json"],
    )


@torch.no_grad()
def _check_training(network: Any, ids: Tensor, name: str) -> None:
    """Run it in training mode, twice from one random state: what needs more inputs, or cannot be repeated, fails here.

    Reformer seeds its hashes from the machine: its resume would not be bit-exact.
    """
    network.train()
    answers = []
    for _ in range(2):
        torch.manual_seed(_SEED)
        answers.append(network(input_ids=ids, use_cache=False).logits)
    network.eval()
    if not torch.equal(*answers):
        raise BrokenAtStart(
            f"{name} draws numbers in training that do not come from torch's random state: no step could be repeated, "
            "and no run resumed",
            where=type(network).__name__,
            advice=["use a student of another family"],
        )


def _choose_attention(network: Any, ids: Tensor, own: Tensor, tolerance: float, notes: list[str], role: str) -> None:
    """Use maskless causal attention if it gives the network's own outputs, else keep the network's attention."""
    if not attend_causally(network):
        return
    change = _change(_answers(network, ids, role), own)
    if change > tolerance:
        network.set_attn_implementation("sdpa")
        notes.append(
            Detail(f"the {role} keeps its own attention masks: without them its answers change by {change:.2g}")
        )


def _change(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.std().clamp_min(1e-6))


@contextmanager
def _in_fp32(network: Any, notes: list[str], role: str) -> Iterator[None]:
    """Cast the network to FP32 in the body, and restore the original tensors after it.

    In half precision rounding hides small differences. If FP32 does not fit, note that the test is coarse.
    """
    tensors = [*network.parameters(), *network.buffers()]
    halves = [tensor for tensor in tensors if tensor.dtype in (torch.float16, torch.bfloat16)]
    needed = 4 * sum(tensor.numel() for tensor in halves if not tensor.is_meta)  # on meta: a layer that is streamed
    if needed > _FREE_SHARE * _free_bytes(tensors[0].device):
        notes.append(f"the {role} was tried in half precision: {needed / 1e9:.1f} GB for FP32 are not free")
        halves = []
    originals = [tensor.data for tensor in halves]
    for tensor in halves:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, data in zip(halves, originals, strict=True):
            tensor.data = data


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return main_memory().available


# -- the configuration -----------------------------------------------------------------------------------
# Read it, and refuse a model that is not a causal language model.


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
    with explained(source.name, "configuration"):
        return _read_config(section, source)


def _read_config(section: ModelSection, source: Source) -> Any:
    if source.is_gguf:
        _check_size(source, {key.rpartition(".")[2]: value for key, value in read_header(source.folder).fields.items()})
        described = gguf_config(source.folder)
        _check_kind(source, described)
        return described
    table = read_json(source, "config.json")
    _check_size(source, table)
    kind = table.get("model_type")
    if not isinstance(kind, str):
        raise _without_kind(source)
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


def _without_kind(source: Source) -> BrokenAtStart:
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
            "it brings its own code: read it, then name its hub id with trust_remote_code = true and a revision"
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
    return f"its text part ({text.model_type}) has no causal class in transformers"


# -- the tokenizer's trial -------------------------------------------------------------------------------
# Try a tokenizer on short texts before it is used. Its files come from elsewhere: a damaged part may panic at the first
# text, and a normaliser may write a million letters for one.


_LONGEST = 1000  # characters for a text or a token of a few
_TEXTS = (*string.printable, "\u00e9", "\u4e2d", "The quick brown fox jumps over the lazy dog, 10 times.\n")
_NUM_DECODED = 256


def try_tokenizer(tokenizer: Any, name: str) -> None:
    """Raise what the tokenizer raises, or BrokenAtStart where it blows up a text."""
    if not getattr(tokenizer, "is_fast", False):
        return
    normalizer = tokenizer.backend_tokenizer.normalizer
    for text in _TEXTS if normalizer is not None else ():
        for step in _steps(normalizer):  # one at a time: each is bounded by its own file, a chain of them is not
            text = step.normalize_str(text)
            _check(text, "normalizer", name)
    tokenizer(_TEXTS[-1], add_special_tokens=False)
    ids = sorted(set(tokenizer.get_vocab().values()))
    for token in ids[:: max(1, len(ids) // _NUM_DECODED)]:
        _check(tokenizer.decode([token]), "decoder", name)


def _steps(normalizer: Any) -> list[Any]:
    """The parts of a sequence of normalisers, itself where it is none."""
    return list(normalizer) if type(normalizer).__name__ == "Sequence" else [normalizer]


def _check(text: str, part: str, name: str) -> None:
    if len(text) > _LONGEST:
        raise BrokenAtStart(
            f"the {part} of the tokenizer of {name} writes {len(text):,} characters for a few",
            where="tokenizer.json",
            advice=["get its files from a place you trust"],
        )


# -- shapes without weights ------------------------------------------------------------------------------
# A network of the right shapes, for counting bytes: call these under a `FakeTensorMode`. Only the configuration is
# read, from a folder, a GGUF header, an adapter's base or a builtin name.


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
        shrink = section.shrink
        if shrink.to:
            shrink = candidates(_network(config, teacher, torch.float32), shrink)[0]
            notes.append(
                f"student.shrink.to: counted as a student of {shrink.layers} layers; one is chosen by its loss"
            )
        config = _cut(config, shrink)
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
    shrink_config(text, shrink)
    return new


# -- names of runs ---------------------------------------------------------------------------------------
# The folder or address of a run names the student in it.


STUDENT = "student"


def model_name(name: str) -> str:
    """The student's folder if `name` is the folder of a run, else the name unchanged. An address is copied here."""
    folder = here(name).expanduser()
    if not folder.is_dir() or not is_run(folder):
        return str(folder) if is_in_store(name) else name
    student = folder / STUDENT
    if not (student / "config.json").exists():
        raise BrokenAtStart(
            f"{name} is the folder of a run that has no student yet",
            where=str(student),
            advice=[f"finish it: stillroom resume {name}", "name the folder of a model"],
        )
    return str(student)


def run_of(name: str) -> Path | None:
    """The folder of the run whose student a name means: the run's own folder, or the student's in it."""
    folder = here(name).expanduser()
    owner = folder.resolve().parent if folder.name == STUDENT else folder
    return owner if folder.is_dir() and is_run(owner) else None


def is_run(folder: Path) -> bool:
    """Whether a folder has a file of events and no weights."""
    return (folder / "events.jsonl").exists() and not any(folder.glob("*.safetensors"))


# -- errors and output of the libraries ------------------------------------------------------------------


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


_BARS: Any = hub_utils


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence both in the body, and restore them after it."""
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    of_hub = not _BARS.are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()  # also those of the hub's library, which a run on the Hub has disabled
        if not of_hub:
            _BARS.disable_progress_bars()
