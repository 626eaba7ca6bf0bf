"""The configuration schema. Imports no torch, so that `stillroom --help` and the doctor are fast.

Each field's description is what a user needs to set it; `docs/reference/configuration.md` is made of them. In order:

    values      bounds, `Section`, and `Scalar`: a constant, or a ramp over the run's progress
    teacher     where the teacher is, what is kept of its answers, the gates of a mixture of experts
    student     its weights, how it is cut from the teacher, adapters
    data        sources, layouts of records, rows
    objectives  registries of objectives, divergences and readers; one section for each objective
    training    steps and rates, phases, precision, guard, evaluation, checkpoints, telemetry; `stillroom write`
    config      `Config`: all of them, and what cannot be set together
    faults      what `--inject` can break
"""

from __future__ import annotations

import difflib
import math
import re
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails

from stillroom.core.errors import ConfigError
from stillroom.core.types import ROLLOUTS

if TYPE_CHECKING:
    from stillroom.losses.mix import Objective, Plan


# -- values -----------------------------------------------------------------------------------------------
# Bounds of numbers, the base class of a section, and numbers that may change during a run.

MOST = 10**9  # of anything that is counted: rows, steps, tokens. Larger numbers are mistakes and overflow 64 bits
MOST_ROWS = 2**20  # in a batch, and micro-batches in a step
MOST_FLOAT = 1e12  # of weights, rates and temperatures: the product of three is finite in FP32
MOST_MINUTES = 10.0**7  # about 19 years; C libraries refuse much longer waits
LEAST_TEMPERATURE = 0.01  # colder, a softmax is an argmax
Count = Annotated[int, Field(ge=0, le=MOST)]
Size = Annotated[int, Field(ge=1, le=MOST)]
Rows = Annotated[int, Field(ge=1, le=MOST_ROWS)]
Positive = Annotated[float, Field(gt=0, le=MOST_FLOAT)]
NonNegative = Annotated[float, Field(ge=0, le=MOST_FLOAT)]


# -- names that packages may add to ------------------------------------------------------------------
# Objects by name that other packages can add to: objectives, divergences, readers of files and checkers.
#
# Names are listed without importing what they stand for, so checking a configuration and `--help` need no torch.
# Packages add names by entry points, a program by `register`. A built-in name cannot be replaced. The registries
# are in `config/schema.py`; their entry points are
#
#     stillroom.objectives   name = "package.module:RECIPE"   a stillroom.losses.Recipe
#     stillroom.divergences  name = "package.module:MEMBER"   a stillroom.losses.divergences.Member
#     stillroom.readers      suffix = "package.module:read"   a function (path, name, tally) -> (where, object) ...
#     stillroom.checkers     name = "package.module:check"    a function (answer, reference, prompt) -> 0 to 1


T = TypeVar("T")
_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")


class Registry(Generic[T]):
    """Objects by name: built in, registered by a program, or from the entry points of installed packages.

    `known` are the built-in names; their modules register them on import. `prefix` is put before the name of each
    entry point.
    """

    def __init__(
        self, group: str, noun: str, *, accepts: Callable[[Any], bool], known: tuple[str, ...] = (), prefix: str = ""
    ) -> None:
        self._group = group
        self._noun = noun
        self._accepts = accepts
        self._known = known
        self._prefix = prefix
        self._things: dict[str, T] = {}
        self._entries_by_name: dict[str, list[EntryPoint]] | None = None

    def register(self, name: str, thing: T) -> None:
        """Make `thing` available as `name`. Raise if the name already stands for something else."""
        self._check(name, thing, "register")
        if self._things.get(name, thing) is not thing:
            raise ConfigError(
                f"there is a {self._noun} {name!r} already, and a name has one meaning",
                advice=["choose another name"],
            )
        self._things[name] = thing

    def names(self) -> tuple[str, ...]:
        """Every name, sorted. Imports nothing."""
        return tuple(sorted({*self._known, *self._things, *self._entries()}))

    def loaded(self) -> dict[str, T]:
        """What is registered already, without entry points that were not imported; in the order of registration."""
        return dict(self._things)

    def is_built_in(self, name: str) -> bool:
        return name in self._known

    def is_plugin(self, name: str) -> bool:
        """Whether looking up a name would import another package. Imports nothing."""
        return name not in self._known and name not in self._things and name in self._entries()

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._things or name in self._entries()

    def find(self, name: str) -> T:
        """Look up a name. An entry point is imported on its first use."""
        if name in self._things:
            return self._things[name]
        if name not in self._entries():
            near = difflib.get_close_matches(name, self.names(), n=1)
            raise ConfigError(
                f"no {self._noun} is called {name!r}",
                advice=[f"did you mean {match}?" for match in near] + [f"one of {', '.join(self.names())}"],
            )
        first, *others = self._entries()[name]
        if others:
            raise ConfigError(
                f"{len(others) + 1} installed packages bring a {self._noun} {name!r}: "
                + ", ".join(_origin(entry) for entry in (first, *others)),
                advice=["uninstall all but one of them"],
            )
        self._things[name] = self._imported(first, name)
        return self._things[name]

    def _imported(self, entry: EntryPoint, name: str) -> T:
        try:
            thing: T = entry.load()
        except Exception as error:  # a foreign module may raise anything on import
            raise ConfigError(
                f"the {self._noun} {name!r} of {_origin(entry)} cannot be imported: {type(error).__name__}: {error}",
                where=entry.value,
                advice=["fix or update that package", "uninstall it, and leave the name out of the configuration"],
            ) from error
        self._check(name, thing, _origin(entry))
        return thing

    def _check(self, name: str, thing: Any, where: str) -> None:
        if not name.startswith(self._prefix) or not _NAME.fullmatch(name.removeprefix(self._prefix)):
            raise ConfigError(
                f"{name!r} cannot name a {self._noun}", where=where, advice=["small letters, digits and _"]
            )
        if not self._accepts(thing):
            raise ConfigError(
                f"{name!r} is of type {type(thing).__name__}, which is not a {self._noun}",
                where=where,
                advice=["docs/guides/extending.md shows one of each kind"],
            )

    def _entries(self) -> dict[str, list[EntryPoint]]:
        """Entry points by name, read once. Those with a built-in or registered name are left out."""
        if self._entries_by_name is None:
            self._entries_by_name = {}
            for entry in dict.fromkeys(entry_points(group=self._group)):
                name = self._prefix + entry.name
                if name not in self._known and name not in self._things:
                    self._entries_by_name.setdefault(name, []).append(entry)
        return self._entries_by_name


def _origin(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would convert: true for 1, "10" for 10, "false" or 0 for false.

        `--set` reads the word none as no value; where "none" is one of a setting's words, that word is meant.
        """
        annotation: Any = cls.model_fields[info.field_name or ""].annotation
        if value is None and get_origin(annotation) is Literal and "none" in get_args(annotation):
            return "none"
        kinds = _kinds(annotation)
        takes_numbers = bool(kinds & {int, float})
        if isinstance(value, bool):
            is_wrong = takes_numbers and bool not in kinds
        elif isinstance(value, str):
            is_wrong = (takes_numbers or bool in kinds) and str not in kinds
        else:
            is_wrong = isinstance(value, int | float) and bool in kinds and not takes_numbers
        if is_wrong:
            raise ValueError(f"expected {'a number' if takes_numbers else 'true or false'}")
        return value


@lru_cache(maxsize=512)
def _kinds(annotation: Any) -> frozenset[Any]:
    """The plain types that an annotation allows; the type of a literal's values counts."""
    if get_origin(annotation) is Literal:
        return frozenset(type(value) for value in get_args(annotation))
    if get_origin(annotation) in (tuple, dict):
        return frozenset()
    parts = get_args(annotation)
    return frozenset().union(*map(_kinds, parts)) if parts else frozenset({annotation})


class Ramp(Section):
    """A value that changes from `start` to `end` while progress goes from `begin` to `until`."""

    start: float = Field(description="value before and at `begin`")
    end: float = Field(description="value at and after `until`")
    begin: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="progress at which the change begins")
    until: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="progress at which it ends")
    shape: Literal["linear", "cosine", "step"] = Field(
        "linear", description="step: `start` until `until` is reached, then `end`"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Ramp:
        if self.begin > self.until:
            raise ValueError(f"begin {self.begin} lies after until {self.until}")
        return self


Scalar = float | Ramp


def ends(value: Scalar) -> tuple[float, ...]:
    """The start and end of a ramp; the one value of a constant."""
    return (value.start, value.end) if isinstance(value, Ramp) else (float(value),)


def between(least: float, most: float = math.inf) -> AfterValidator:
    """Validate that a scalar is finite and in [least, most] throughout the run."""

    def check(value: Scalar) -> Scalar:
        for end in ends(value):
            if not (least <= end <= most and math.isfinite(end)):
                bounds = f"at least {least:g}" if most >= MOST and end < least else f"between {least:g} and {most:g}"
                raise ValueError(f"must be {bounds}" + (f", and reaches {end:g}" if isinstance(value, Ramp) else ""))
        return value

    return AfterValidator(check)


Weight = Annotated[Scalar, between(0.0, MOST_FLOAT)]
Share = Annotated[Scalar, between(0.0, 1.0)]
Temperature = Annotated[Scalar, between(LEAST_TEMPERATURE, MOST_FLOAT)]


# -- teacher ----------------------------------------------------------------------------------------------
# What is read of a teacher and how: [teacher], with .requests, .signal and .router.


class ModelSection(Section):
    revision: str | None = Field(None, description="commit of a hub model; required with trust_remote_code")
    trust_remote_code: bool = Field(False, description="run code that comes with this model; needs a pinned revision")

    allow_base: str | None = Field(
        None,
        description="address (s3://...) at or below which the base model of an adapter may lie; one that is a folder, "
        "or a hub id, needs no such word",
    )

    @model_validator(mode="after")
    def _pinned(self) -> ModelSection:
        if self.trust_remote_code and not (self.revision and len(self.revision) == 40):
            raise ValueError("trust_remote_code needs `revision` set to a 40-digit commit, so that the code is pinned")
        return self


class RequestsConfig(Section):
    model: str | None = Field(None, description="name of the model on the server; none: the only one it lists")
    shape: Literal["auto", "prompt_logprobs", "echo", "llama.cpp"] = Field(
        "auto",
        description="prompt_logprobs: the field of vLLM; echo: `echo` with `logprobs`, tokens as token_id:N; "
        "llama.cpp: `/completion` of llama.cpp's server, asked token by token; auto: the first that the server answers",
    )
    concurrency: Annotated[int, Field(ge=1, le=512)] = Field(8, description="requests under way at once")
    timeout_seconds: Annotated[float, Field(gt=0, le=60 * MOST_MINUTES)] = Field(
        300.0, description="for a whole answer, until asked again; what a server says of itself has 30 at most"
    )
    retries: Annotated[int, Field(ge=0, le=100)] = Field(
        8, description="of a request that got no answer, an answer cut short, or status 408, 429 or 5xx"
    )
    pause_seconds: Annotated[float, Field(gt=0, le=60 * MOST_MINUTES)] = Field(
        0.5, description="before the first retry; doubled with each, up to 60; Retry-After is heeded"
    )
    api_key_variable: str | None = Field(
        None, description="environment variable with the server's key; the key itself is never logged or written"
    )
    check_temperature: bool = Field(
        True,
        description="refuse answers that fit their own text much better sharpened or flattened, as log-probabilities "
        "of another temperature do",
    )


def check_url(url: str) -> None:
    """Raise ValueError for an address that cannot be asked, without repeating it: it may hold a secret."""
    try:
        parts = urlsplit(url)
        is_known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_known = False
    if not is_known:
        raise ValueError("teacher.server is not the address of a server: write http://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "teacher.server holds more than scheme, host, port and path, and a run's configuration is written to its "
            "folder: name a variable with the key in teacher.requests.api_key_variable"
        )


SparseKind = Literal["top_k", "sampled", "hybrid", "renormalised", "target"]
DEFAULT_K = 64
DEFAULT_M = 8
DEFAULT_HYBRID_DRAWS = 12
DEFAULT_DRAWS = 50  # about twelve different tokens (Anshumann et al. 2025)


class SignalConfig(Section):
    kind: Literal["auto", "dense"] | SparseKind = Field(
        "auto",
        description="dense: all tokens; top_k: the k most likely and the exact mass of the rest, for every divergence; "
        "sampled: drawn tokens; hybrid: the m most likely and draws from the rest, unbiased for forward_kl; "
        "renormalised: k tokens as if no other could come, which is biased; target: the probability of the target "
        "alone, for objectives.alm. auto: dense live; what a cache holds; for a new cache top_k where "
        "objectives.kd.top_k is set or the divergence is not forward_kl, else hybrid; with two tokenizers hybrid for "
        "objectives.prefix_match or exact_match, else target",
    )
    k: Size | None = Field(None, description="of top_k (64, or objectives.kd.top_k)")
    m: Size | None = Field(None, description="of hybrid (8)")
    draws: Annotated[int, Field(ge=1, le=255)] | None = Field(None, description="of hybrid (12) and sampled (50)")

    compare: Literal["stored", "whole"] = Field(
        "stored",
        description="with teacher.cache, what the finished student is compared with. stored: the answers of the cache; "
        "whole: the teacher itself, which is loaded once, at the end",
    )

    @model_validator(mode="after")
    def _belonging(self) -> SignalConfig:
        """A number that the kind does not read would be ignored in silence."""
        read = {
            "auto": (),
            "dense": (),
            "top_k": ("k",),
            "renormalised": ("k",),
            "sampled": ("draws",),
            "hybrid": ("m", "draws"),
            "target": (),
        }[self.kind]
        for name in ("k", "m", "draws"):
            if getattr(self, name) is not None and name not in read:
                raise ValueError(f"{name} is not read with kind = {self.kind!r}")
        return self


RouterMode = Literal[
    "frozen", "all-experts", "knowledge-augmentation", "truth", "sar", "sar-joint", "sar-transient", "sar-meta"
]
TRAINING_MODES = frozenset({"truth", "sar", "sar-joint", "sar-meta"})  # those that train the gates


class RouterConfig(Section):
    """The gates of a mixture-of-experts teacher."""

    mode: RouterMode = Field(
        "frozen",
        description="frozen: the teacher as it is; all-experts, knowledge-augmentation: other experts answer; truth: "
        "gates tuned on the labels; sar: on labels and student in turn; sar-joint: in one backward with the student; "
        "sar-transient and sar-meta are experimental",
    )
    patterns: tuple[str, ...] = Field((), description="names of the gate modules, with *; empty: found by structure")
    truth_weight: NonNegative = Field(
        1.0, description="cross-entropy of the teacher on the labels: what keeps it a teacher"
    )
    student_weight: Annotated[float, Field(ge=-MOST_FLOAT, le=MOST_FLOAT)] = Field(
        0.1, description="KL(teacher || student): pulls the teacher to the student; below 0 pushes it away"
    )
    anchor_weight: NonNegative = Field(
        1.0, description="KL(original teacher || teacher); costs one more teacher forward when above 0"
    )
    load_balance_weight: NonNegative = Field(0.0, description="keeps the experts evenly used")
    entropy_weight: NonNegative = Field(0.0, description="rewards gates that stay undecided")
    every: Size = Field(2, description="student steps between router steps")
    gradient_checkpointing: bool = Field(False, description="recompute the teacher's layers in its backward")
    max_degradation: Positive = Field(
        0.02, description="nats the teacher's held-out loss may rise before its gates are restored and frozen"
    )
    probe_steps: Count = Field(
        0, description="router steps on the labels alone before the run, to see whether training is worthwhile; 0: none"
    )
    probe_threshold: NonNegative = Field(
        0.01, description="nats the teacher's held-out loss must fall in the probe for the router to be trained"
    )
    force: bool = Field(False, description="train the router whatever the probe found")


Blocks = Literal["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]  # of GGUF, rounded here
Recipes = Literal[Blocks, "q4_k_m", "q5_k_m", "q6_k"]  # the others by llama.cpp's library


class TeacherConfig(ModelSection):
    model: str = Field(
        "builtin:teacher",
        description="folder, hub id, GGUF file, LoRA adapter folder, builtin:teacher or builtin:moe-teacher; self: the "
        "frozen base under student.adapter; ema: an average of the student over its steps",
    )
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.999, description="with model = ema: share of the average that each applied step keeps"
    )
    concurrent: bool = Field(
        False, description="hold the models of data.train[].teacher in memory with each other and with this one"
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="storage of the teacher's weights; auto: float32 on a CPU (bfloat16 next to a large student in "
        "bf16-mixed, where the CPU has BF16 units), bfloat16 on a GPU with native bf16, float16 on any other",
    )
    placement: Literal["device", "offload", "stream", "shard"] = Field(
        "device",
        description="offload: weights live in main memory and visit the device while they answer; stream: layers stay "
        "in the teacher's files and come to the device one at a time, at most two of them at once; shard: each of "
        "several processes holds a part of every weight, and a layer is gathered for its forward",
    )
    quantisation: Literal["none", "int8", "bnb-8bit", "bnb-4bit", Blocks, "file"] = Field(
        "none",
        description="bits of the teacher's linear layers; the head stays as it is. int8: by torchao, on any device; "
        "bnb-8bit, bnb-4bit: by bitsandbytes, on a CUDA GPU; q4_0 to q8_0: codes of GGUF's blocks, on any device; "
        "file: the codes of a GGUF file as they are, never unpacked as a whole",
    )
    max_quantisation_kl: Positive = Field(
        0.05,
        description="nats a token that quantisation may change the teacher's answers by, KL(full || quantised) on rows "
        "of the data; above it the run is refused, because the student would learn that error as if the teacher had "
        "meant it. At 0.05 at most 16 % of a distribution lies elsewhere (Pinsker's inequality)",
    )
    cache: str | None = Field(
        None,
        description="folder written by `stillroom cache`: the teacher is then not loaded. auto: a folder next to the "
        "run's, written on first use",
    )
    server: str | None = Field(
        None,
        description="URL of a server that gives log-probabilities of prompts (vLLM, llama.cpp's server): the teacher "
        "is asked there and not loaded. teacher.model then names its tokenizer: a folder or hub id, no weights needed",
    )
    requests: RequestsConfig = Field(default_factory=RequestsConfig)
    signal: SignalConfig = Field(default_factory=SignalConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)

    @property
    def is_student(self) -> bool:
        """Whether the student's own network answers: without its adapter, or with averaged weights."""
        return self.model in ("self", "ema")

    @model_validator(mode="after")
    def _has_no_weights(self) -> TeacherConfig:
        """What a teacher inside of the student cannot have: files, or a place of its weights."""
        if not self.is_student:
            return self
        alike = {"cache": bool(self.cache), "server": bool(self.server), "revision": bool(self.revision)}
        alike |= {"dtype": self.dtype != "auto", "placement": self.placement != "device"}
        alike |= {"quantisation": self.quantisation != "none", "router.mode": self.router.mode != "frozen"}
        alike |= {"signal.kind": self.signal.kind not in ("auto", "dense")}
        for name in (name for name, is_set in alike.items() if is_set):
            raise ValueError(f"teacher.model = {self.model!r} is the student's own network: leave teacher.{name} out")
        return self

    @model_validator(mode="after")
    def _live_gates(self) -> TeacherConfig:
        if self.cache and self.router.mode != "frozen":
            raise ValueError(f"teacher.router.mode {self.router.mode} needs a live teacher: leave teacher.cache out")
        if self.signal.kind not in ("auto", "dense") and self.router.mode != "frozen":
            raise ValueError(f"teacher.router.mode {self.router.mode} needs teacher.signal.kind = 'dense'")
        if self.quantisation != "none" and self.router.mode != "frozen":
            raise ValueError(f"teacher.router.mode {self.router.mode} needs teacher.quantisation = 'none'")
        if self.placement in ("stream", "shard") and self.router.mode != "frozen":
            raise ValueError(f"teacher.router.mode {self.router.mode} needs teacher.placement = 'device' or 'offload'")
        if self.quantisation != "none" and self.placement != "device":
            raise ValueError(
                f"a quantised teacher stays on the device: teacher.placement = {self.placement!r} needs "
                "teacher.quantisation = 'none'"
            )
        if self.placement == "shard" and self.cache:
            raise ValueError("teacher.placement = 'shard' is for a teacher that answers live: leave teacher.cache out")
        if self.placement == "shard" and self.signal.kind not in ("auto", "dense"):
            raise ValueError(
                f"teacher.signal.kind = {self.signal.kind!r} asks row by row, and all processes must ask a sharded "
                "teacher as often: set teacher.signal.kind = 'dense' and objectives.kd.top_k, or teacher.placement"
            )
        if self.cache and self.signal.kind == "dense":
            raise ValueError("a cache holds no dense answers: leave teacher.signal.kind out, or teacher.cache")
        return self

    @model_validator(mode="after")
    def _elsewhere(self) -> TeacherConfig:
        """What a teacher on a server cannot have: its weights are not here."""
        if self.server is None:
            return self
        check_url(self.server)
        refused = {
            "placement": self.placement != "device",
            "quantisation": self.quantisation != "none",
            "router.mode": self.router.mode != "frozen",
            "signal.compare": self.signal.compare != "stored",
        }
        for name in (name for name, is_set in refused.items() if is_set):
            raise ValueError(f"teacher.{name} is for weights on this machine: leave it out, or teacher.server")
        if self.signal.kind not in ("auto", "top_k", "renormalised"):
            raise ValueError(
                f"teacher.signal.kind = {self.signal.kind!r} needs the whole distribution, and a server gives the "
                "top tokens: set teacher.signal.kind = 'top_k'"
            )
        return self


# -- student ----------------------------------------------------------------------------------------------
# [student], with .shrink (cut from the teacher) and .adapter (low-rank training).


class ShrinkConfig(Section):
    layers: Count | tuple[int, ...] = Field(
        0, description="how many of the teacher's layers are kept, or which, counted from 0; 0: all"
    )
    method: Literal["auto", "loss", "influence", "even"] = Field(
        "auto",
        description="how so many layers are chosen. loss: take out one at a time, the one whose absence raises the "
        "loss least; influence: keep those that change the hidden states most; even: at equal steps, without looking "
        "at text; auto: loss where it takes at most 1e14 operations on a CPU, 1e16 on a GPU, else influence",
    )
    width: Count = Field(0, description="channels kept, by importance; 0: all")
    mlp_width: Count = Field(0, description="neurons kept in each layer, by importance; 0: all")
    heads: Count = Field(0, description="attention heads kept whole in each layer; 0: all")
    experts: Count = Field(
        0, description="experts of a mixture kept in each layer, those with the most routing weight; 0: all"
    )
    to: Annotated[str, Field(pattern=r"^(\d+(\.\d+)?[kmbKMB]?)?$")] = Field(
        "",
        description="cut layers and widths together to so many parameters, as 80M, or 0.6 of the teacher's; a few "
        "students of that size are made, and the one with the lowest loss is taken",
    )
    rounds: Annotated[int, Field(ge=1, le=5)] = Field(
        1,
        description="cut in so many rounds: sizes fall evenly, and each round but the last recovers in RUN/rounds "
        "before the next cut; train.max_steps and train.epochs are those of all rounds together",
    )
    round_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="share of the steps that the rounds before the last take together"
    )
    of_layers: tuple[int, ...] = Field(
        (),
        description="cut student.model instead of the teacher; its layers were these of the teacher, counted from 0. "
        "Rounds set it",
    )

    @property
    def cuts_width(self) -> bool:
        return bool(self.width or self.mlp_width or self.heads)

    @field_validator("to", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _chooses_alone(self) -> ShrinkConfig:
        if self.to and (self.layers or self.cuts_width or self.experts):
            raise ValueError(
                "to chooses layers, width, mlp_width and heads: leave them and experts out, or leave to out"
            )
        return self

    @model_validator(mode="after")
    def _has_rounds(self) -> ShrinkConfig:
        if self.rounds > 1 and (self.of_layers or isinstance(self.layers, tuple)):
            given = "of_layers is set by them" if self.of_layers else "layers is a list: give their number"
            raise ValueError(f"rounds is {self.rounds}, and {given}")
        if self.rounds > 1 and not (self.layers or self.to or self.cuts_width or self.experts):
            raise ValueError(f"rounds is {self.rounds}, and nothing is cut: give layers or to")
        return self


class AdapterConfig(Section):
    """Train low-rank matrices next to the student's linear layers; the student's weights stay frozen."""

    kind: Literal["lora", "dora"] = Field("lora", description="dora: the length of each row of a weight is trained too")
    rank: Size = Field(16, description="rank of the change to each layer's weight")
    alpha: Positive | None = Field(None, description="the change is multiplied by alpha / rank; none: twice the rank")
    targets: tuple[str, ...] = Field(
        (),
        description="linear layers by the last parts of their names, or with *: q_proj, mlp.down_proj, *.0.*; empty: "
        "all linear layers of the decoder's blocks",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="of the adapter's input, in training")
    base_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", Blocks, "nf4"] = Field(
        "auto",
        description="storage of the frozen weights; auto: what the precision multiplies in. int8: linear layers as "
        "codes with a scale for each output; q4_0 to q8_0: as codes of GGUF's blocks, 4.5 to 8.5 bits a weight; "
        "nf4: by bitsandbytes, 4.5 bits a weight; all of these under fp32, bf16-mixed and fp16-mixed",
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        """Names may be given as one text with commas; all-linear is the word other programs use for all."""
        names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
        return () if names == ["all-linear"] else names

    @model_validator(mode="after")
    def _numbers_are_there(self) -> AdapterConfig:
        if self.kind == "dora" and self.base_dtype.startswith(("int8", "q", "nf4")):
            raise ValueError(
                "kind = 'dora' trains the lengths of the base's rows and needs its numbers: set base_dtype = "
                f"'float16', or kind = 'lora' for a base in {self.base_dtype}"
            )
        return self

    @property
    def scaled_alpha(self) -> float:
        return self.alpha if self.alpha is not None else 2.0 * self.rank


class StudentConfig(ModelSection):
    model: str = Field(
        "builtin:student",
        description="folder, hub id, or builtin:student; not read where the student is cut from its teacher",
    )
    init: Literal["auto", "pretrained", "random", "shrink"] = Field(
        "auto",
        description="random: take only the configuration; shrink: cut from the teacher as `shrink` says; "
        "auto: random where the folder has no weights",
    )
    shrink: ShrinkConfig = Field(default_factory=ShrinkConfig)
    vocabulary: Literal["own", "teacher"] = Field(
        "own",
        description="teacher: give a loaded student the teacher's tokenizer; its embeddings are copied where tokens "
        "are the same bytes, and averaged over its own tokens otherwise",
    )
    gradient_checkpointing: bool = Field(False, description="trade a third more compute for activation memory")
    adapter: AdapterConfig | None = Field(
        None, description="train an adapter and leave the student's own weights alone"
    )
    quantise: Literal["", Recipes] = Field(
        "",
        description="train with weights rounded as a GGUF file of this format rounds them, so that the file is what "
        "was trained; the teacher is the unquantised student unless one is given. q4_k_m, q5_k_m and q6_k need "
        "stillroom[llamacpp] and round ten times as slowly",
    )
    quantise_layers: dict[str, str] = Field(
        default_factory=dict,
        description="with quantise: other formats for single layers, by pattern of parameter names: "
        "{'*.down_proj.weight' = 'q8_0'}",
    )

    @model_validator(mode="after")
    def _can_be_rounded(self) -> StudentConfig:
        if self.quantise_layers and not self.quantise:
            raise ValueError("quantise_layers goes with quantise")
        if self.quantise and self.adapter is not None:
            raise ValueError(
                "quantise rounds weights that are trained, and an adapter leaves them as they are: set "
                f"adapter.base_dtype = '{self.quantise}' to train an adapter next to a quantised base"
            )
        return self

    @model_validator(mode="after")
    def _shrink_needs_init(self) -> StudentConfig:
        if self.shrink != ShrinkConfig() and self.init != "shrink":
            raise ValueError(f"shrink is set and init is {self.init!r}: set student.init = 'shrink' to cut the student")
        return self

    @model_validator(mode="after")
    def _has_embeddings_to_keep(self) -> StudentConfig:
        if self.vocabulary == "own":
            return self
        if self.init == "shrink":
            raise ValueError(
                "vocabulary = 'teacher' changes the tokens of a student, and one that is cut from its teacher has the "
                "teacher's: leave vocabulary out"
            )
        if self.init == "random":
            raise ValueError(
                "vocabulary = 'teacher' keeps embeddings that were learned, and init = 'random' has none: leave "
                "vocabulary out, and give a configuration with the teacher's vocab_size"
            )
        if self.adapter is not None:
            raise ValueError(
                "vocabulary = 'teacher' changes the student's embeddings, and an adapter leaves them as they are: "
                "leave student.adapter out to train all weights, or leave vocabulary out"
            )
        return self

    @property
    def reads_model(self) -> bool:
        """Whether `model` is read: not where the student is cut from its teacher."""
        return self.init != "shrink" or bool(self.shrink.of_layers)

    @property
    def reads_as_teacher(self) -> bool:
        """Whether its text is read in the teacher's tokens, whatever tokenizer its folder has."""
        return self.init == "shrink" or self.vocabulary == "teacher"


# -- data -------------------------------------------------------------------------------------------------
# [data]: sources, the layout of their records, and how rows are made of them.

MOST_TOKENS = 2**24  # in a row
# The fields that records are made of; `columns` names all of one group.
SHAPES = (
    ("text",),
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
    ("messages",),
    ("conversations",),
)
CONTEXTS = ("teacher_messages", "teacher_prompt")  # what the teacher alone reads, in addition to a shape
Pieces = tuple[tuple[str, str | None], ...]  # (literal text, name of the column that follows it, if any)


@lru_cache(maxsize=64)  # asked for each record
def template_pieces(template: str) -> Pieces:
    """The pieces of a template such as "Q: {question}". A brace that stands for itself is written twice.

    Raise ValueError where it is no such text or names no column.
    """
    pieces: list[tuple[str, str | None]] = []
    for literal, name, form, conversion in string.Formatter().parse(template):
        if name is not None and (form or conversion or not name or not name.strip() == name or set(name) & set(".[")):
            raise ValueError(f"{{{name}}} in the template must be the name of a column, and nothing else")
        pieces.append((literal, name))
    if not any(name for _, name in pieces):
        raise ValueError("the template names no column: write one in braces, as in 'Q: {question}'")
    return tuple(pieces)


class Layout(Section):
    """How an object of a file becomes a record. Without settings, by the fields it has."""

    columns: dict[str, str] = Field(
        default_factory=dict,
        description="which column holds each field of a record, as {prompt = 'question', completion = 'answer'}; the "
        "others are not read",
    )
    template: str = Field(
        "", description="the text of a record, its columns in braces, as in 'Q: {question}\\nA: {answer}'"
    )
    scored: tuple[str, ...] = Field(
        (), description="columns of the template whose text is learned, with what ends the template; empty: all text"
    )

    @field_validator("scored", mode="before")
    @classmethod
    def _as_names(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("columns")
    @classmethod
    def _are_a_shape(cls, columns: dict[str, str]) -> dict[str, str]:
        if columns and not any(set(columns) - {"tools", *CONTEXTS} == set(shape) for shape in SHAPES):
            known = " or ".join(", ".join(shape) for shape in SHAPES) + ", and tools"
            raise ValueError(f"names the fields {', '.join(columns)}; a record is made of {known}")
        if any(not column for column in columns.values()):
            raise ValueError("a column has an empty name")
        return columns

    @field_validator("template")
    @classmethod
    def _is_a_template(cls, template: str) -> str:
        if template:
            template_pieces(template)
        return template

    @model_validator(mode="after")
    def _is_one_way(self) -> Layout:
        if self.columns and self.template:
            raise ValueError("columns and template are both set: the template names its columns itself, set only one")
        if self.scored and not self.template:
            raise ValueError("scored names columns of a template, and template is not set")
        names = [name for _, name in template_pieces(self.template) if name] if self.template else []
        if strange := [name for name in self.scored if name not in names]:
            raise ValueError(f"scored names {', '.join(strange)}, and the template has {', '.join(names)}")
        return self

    @property
    def has_layout(self) -> bool:
        return bool(self.columns or self.template)

    @property
    def pieces(self) -> Pieces:
        return template_pieces(self.template) if self.template else ()

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """The columns that must be there. `input` and `tools` may be missing from some records."""
        if self.template:
            return tuple(dict.fromkeys(name for _, name in self.pieces if name))
        return tuple(self.columns.values())


class SourceConfig(Layout):
    """One of several sources of training data."""

    path: str = Field(description="file, glob, folder, hf:NAME[:CONFIG[:SPLIT]], builtin:stdlib or builtin:qa")
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        1.0, description="passes over this source in one epoch of the run; 2: seen twice as often, 0.5: half of it"
    )
    objectives: Literal["all", "labels"] = Field(
        "all", description="labels: learn from the text alone; the teacher is not asked about this source"
    )
    teacher: str | None = Field(
        None,
        description="another teacher for this source: a folder written by `stillroom cache --source`, or a model; "
        "none: that of [teacher], which also answers held-out text",
    )

    @model_validator(mode="after")
    def _asks_it(self) -> SourceConfig:
        if self.teacher and self.objectives == "labels":
            raise ValueError("objectives = 'labels' asks no teacher about this source: leave its teacher out")
        return self


SOURCE_TAGS = ("<name>", "<sources>")  # pydantic's names of the two forms of `train`, in its errors


def _tag_of(value: Any) -> str:
    return SOURCE_TAGS[not isinstance(value, str)]


def _as_sources(value: Any) -> Any:
    """One table is a list of one; a name in a list is a source without settings."""
    if isinstance(value, dict | SourceConfig):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple({"path": one} if isinstance(one, str) else one for one in value)
    return value


Sources = Annotated[
    Annotated[str, Tag(SOURCE_TAGS[0])] | Annotated[tuple[SourceConfig, ...], Field(min_length=1), Tag(SOURCE_TAGS[1])],
    Discriminator(_tag_of),
]


class DataConfig(Layout):
    train: Sources = Field(
        "builtin:stdlib",
        description="file, glob, folder, hf:NAME[:CONFIG[:SPLIT]], builtin:stdlib or builtin:qa; or several, as "
        "[{path = 'a.jsonl', weight = 2}, {path = 'b.jsonl', objectives = 'labels'}]",
    )
    eval: str | None = Field(None, description="held-out data; without it a share of `train` is held out")
    eval_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.05, description="share held out by content hash when `eval` is not given; of few documents more are"
    )
    train_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the training documents that is used, chosen by content hash"
    )
    max_records: Count = Field(0, description="records read from each source, the first ones; 0: all")
    streaming: bool = Field(
        False, description="read hub datasets over the network without storing them; see max_records"
    )
    max_length: Annotated[int, Field(ge=8, le=MOST_TOKENS)] = Field(256, description="tokens in a row")
    packing: Literal["auto", "blocks", "rows", "packed"] = Field(
        "auto",
        description="of training data. blocks: documents end to end in full rows; rows: each record in its own "
        "rows, padded; packed: several records in a row that do not see each other; auto: blocks for plain text, rows "
        "where records have a prompt. Held-out records are scored alone",
    )
    group_by_length: bool = Field(
        False, description="put training rows of about equal length into a batch: less padding, another order"
    )
    order: Literal["shuffled", "short_first"] = Field(
        "shuffled",
        description="of training rows. short_first: from short to long for the first 0.3 of the steps, at most the "
        "first epoch; then shuffled",
    )
    cache: str = Field(
        "auto",
        description="folder of the token store, which keeps large files tokenized; auto: the user's cache folder, for "
        "files of 32 MB and more together; off: tokenize at every start, in memory",
    )
    bos: Literal["auto"] | bool = Field(
        "auto", description="begin each document with the begin-of-text token; auto: where the tokenizer does by itself"
    )
    day: str = Field(
        "",
        description="the day that a chat template prints, where it prints one, as 2026-01-31; empty: the day on which "
        "the run begins, which the run keeps",
    )
    chat: Literal["auto", "on", "off"] = Field(
        "auto",
        description="print records of a prompt and an answer with the student's chat template, as `generate` asks; "
        "auto: where its tokenizer has one; off: as they stand. Texts and data.template are never printed with it",
    )
    thoughts: Literal["keep", "drop"] = Field(
        "keep",
        description="reasoning of answers, in a field of the message or between <think> and </think> at their "
        "beginning. keep: learned as the chat template prints it; drop: left out of the text",
    )
    on_long: Literal["cut", "drop", "split"] = Field(
        "cut",
        description="records with a prompt that are longer than max_length. cut: the first row is kept; drop: they are "
        "left out; split: consecutive rows, as of plain text, which is always split",
    )
    train_on_prompt: bool = Field(False, description="score the prompt's tokens too")
    teacher_prefix: str = Field(
        "",
        description="text that only the teacher reads before each record: as a system message of chats, as it stands "
        "before other text. Records may have their own, in teacher_messages or teacher_prompt",
    )
    min_coverage: Annotated[float, Field(ge=0, le=1)] = Field(
        0.5,
        description="with a teacher of another tokenizer: least share of the scored text's bytes that both "
        "tokenizers read as the same; below it the pair is refused",
    )
    max_bad_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.01, description="stop when more than this share of the records cannot be used"
    )

    @field_validator("day", mode="before")
    @classmethod
    def _is_a_day(cls, value: Any) -> Any:
        if isinstance(value, date):  # TOML has dates
            return value.isoformat()
        if isinstance(value, str) and value:
            try:
                date.fromisoformat(value)
            except ValueError:
                raise ValueError(f"{value!r} is not a date: write it as 2026-01-31") from None
        return value

    @field_validator("thoughts", mode="before")
    @classmethod
    def _is_no_weight(cls, value: Any) -> Any:
        if isinstance(value, int | float):
            raise ValueError(f"{value}: thoughts have no weight, because targets have none: 'keep' or 'drop'")
        return value

    @field_validator("train", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return _as_sources(value)

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The sources of the training data. One without a layout has that of the section."""
        if isinstance(self.train, str):
            return (self._with_layout(SourceConfig(path=self.train)),)
        return tuple(self._with_layout(source) for source in self.train)

    @property
    def source_names(self) -> tuple[str, ...]:
        """A name for each source: its path, with a number where a path stands twice."""
        paths = [source.path for source in self.sources]
        return tuple(
            path if paths.count(path) == 1 else f"{path} #{paths[: place + 1].count(path)}"
            for place, path in enumerate(paths)
        )

    @property
    def label_sources(self) -> frozenset[str]:
        """The names of the sources that are learned from the labels alone."""
        named = zip(self.source_names, self.sources, strict=True)
        return frozenset(name for name, source in named if source.objectives == "labels")

    @property
    def source_teachers(self) -> dict[str, str]:
        """The teachers that sources have apart from the run's, by the names of the sources."""
        named = zip(self.source_names, self.sources, strict=True)
        return {name: source.teacher for name, source in named if source.teacher}

    def named(self, spec: str) -> SourceConfig:
        """A spec such as `eval` as a source with the section's layout."""
        return self._with_layout(SourceConfig(path=spec))

    def alone(self, source: SourceConfig) -> DataConfig:
        """The section as if this source, with its layout, were all its training data."""
        layout = {name: getattr(source, name) for name in Layout.model_fields}
        return self.model_copy(update={"train": source.path, **layout})

    @property
    def is_mixed(self) -> bool:
        """Whether the sources' rows are drawn by weight and kept apart. A list of one plain source is that source."""
        first, *others = self.sources
        return bool(others) or first.weight != 1.0 or first.objectives != "all" or bool(first.teacher)

    def _with_layout(self, source: SourceConfig) -> SourceConfig:
        layout = {name: getattr(self, name) for name in Layout.model_fields}
        return source if source.has_layout else source.model_copy(update=layout)


# -- objectives -------------------------------------------------------------------------------------------
# [objectives]: what can be registered by other packages, one class for each built-in objective, and all together.


class ObjectiveSection(Section):
    """Base of an objective's section. A field of type `Scalar` may change during a run."""

    needs_teacher: ClassVar[bool] = True  # False: scored without the teacher's answer
    looks_inside: ClassVar[bool] = True  # False: stored answers of a teacher suffice
    compares_spans: ClassVar[bool] = False  # True: each model reads the text in its own tokens

    weight: Weight = Field(0.0, description="weight of the term; 0: not computed at all")

    @property
    def used_weight(self) -> Scalar:
        """The weight, or 0 where other settings switch the objective off."""
        return self.weight

    @property
    def settings(self) -> dict[str, Scalar]:
        """The scalars other than the weight, by field name."""
        return {
            name: getattr(self, name)
            for name, info in type(self).model_fields.items()
            if name != "weight" and Ramp in get_args(info.annotation)
        }


@dataclass(frozen=True)
class Recipe:
    """How to build an objective: the class of its config section, and a factory called when the models are loaded."""

    section: type[ObjectiveSection]
    make: Callable[[Plan], Objective]


def _is_recipe(thing: Any) -> bool:
    return isinstance(thing, Recipe) and issubclass(thing.section, ObjectiveSection) and callable(thing.make)


OBJECTIVES: Registry[Recipe] = Registry(
    "stillroom.objectives",
    "objective",
    accepts=_is_recipe,
    known=(
        "kd",
        "ce",
        "feature",
        "layerwise",
        "attention",
        "contrastive",
        "alm",
        "exact_match",
        "prefix_match",
        "uld",
        "span_hidden",
    ),
)
# Only the names, because members import torch; `losses/divergences.py` defines what a member is.
DIVERGENCES: Registry[Any] = Registry(
    "stillroom.divergences",
    "divergence",
    accepts=lambda thing: callable(getattr(thing, "make", None)) and isinstance(getattr(thing, "settings", 0), tuple),
    known=(
        "forward_kl",
        "reverse_kl",
        "jsd",
        "skew_forward_kl",
        "skew_reverse_kl",
        "total_variation",
        "alpha_beta",
        "taid",
        "todi",
        "akl",
    ),
)
# By suffix; `data/sources.py` registers the built-in ones on import.
READERS: Registry[Any] = Registry("stillroom.readers", "reader of files", accepts=callable, prefix=".")
# `data/checkers.py` registers the built-in ones on import.
CHECKERS: Registry[Any] = Registry(
    "stillroom.checkers", "checker of answers", accepts=callable, known=("exact", "number", "json")
)
REGEX = "regex:"


def _known_checker(name: str) -> str:
    if name.startswith(REGEX):
        try:
            re.compile(name.removeprefix(REGEX))
        except re.error as error:
            raise ValueError(f"{name!r} holds no regular expression: {error}") from error
    elif name not in CHECKERS:
        raise ValueError(f"no checker has this name: one of {', '.join(CHECKERS.names())}, or {REGEX}PATTERN")
    return name


Checker = Annotated[str, AfterValidator(_known_checker)]


def _known_divergence(name: str) -> str:
    if name not in DIVERGENCES:
        near = difflib.get_close_matches(name, DIVERGENCES.names(), n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"no divergence has this name: {meant}one of {', '.join(DIVERGENCES.names())}")
    return name


Divergence = Annotated[str, AfterValidator(_known_divergence)]


class KdConfig(ObjectiveSection):
    looks_inside = False

    weight: Weight = Field(1.0, description="weight of the distillation term")
    divergence: Divergence = Field("forward_kl", description="forward_kl for base models; reverse_kl seeks modes")
    temperature: Temperature = Field(1.0, description="softens both sides; the term is multiplied by its square")
    beta: Share = Field(0.5, description="place of the mixture in jsd: 0 is forward, 1 is reverse KL; of alpha_beta")
    alpha: Share = Field(
        0.1,
        description="share of the first distribution in the mixture of a skewed KL; power of the teacher in alpha_beta",
    )
    interpolation: Share = Field(
        Ramp(start=0.4, end=1.0), description="taid: how far the target is on its way from student (0) to teacher (1)"
    )
    top_k: Annotated[int | Ramp, between(0, MOST)] = Field(
        0, description="use the teacher's k most likely tokens and the exact mass of the rest; 0: all tokens"
    )
    token_weight: Literal["uniform", "entropy"] = Field(
        "uniform", description="entropy: positions weigh by the student's entropy over its mean in the sequence"
    )
    token_fraction: Annotated[Scalar, between(1e-4, 1.0)] = Field(
        1.0, description="share of each sequence's positions that is distilled: those where token_criterion is largest"
    )
    token_criterion: Literal["hellinger", "entropy"] = Field(
        "hellinger", description="hellinger: distance of teacher and student; entropy: the student's"
    )
    token_temperature: Annotated[Scalar, between(0.0, 10.0)] = Field(
        0.0, description="strength of the temperature by difficulty (AdaKD uses 0.5); 0: one temperature for all"
    )
    on_wrong_teacher: Literal["keep", "label_residual", "mft"] = Field(
        "keep",
        description="label_residual: the mass a top-k teacher leaves over goes to the label; mft: where the teacher's "
        "most likely token is not the label, the label is mixed in until it leads by 0.2",
    )

    @model_validator(mode="after")
    def _possible(self) -> KdConfig:
        if self.on_wrong_teacher == "mft" and self.top_k != 0:
            raise ValueError("on_wrong_teacher = 'mft' needs the teacher's whole row: set top_k = 0")
        return self

    @property
    def needs_both_logits(self) -> bool:
        """Whether token weights or temperatures depend on both models' logits, which are then computed twice."""
        return self.token_weight != "uniform" or self.token_fraction != 1.0 or self.token_temperature != 0.0


class CeConfig(ObjectiveSection):
    needs_teacher = False
    looks_inside = False

    weight: Weight = Field(0.0, description="weight of cross-entropy on the data's own tokens")


LayerMap = Literal["last", "proportional"] | tuple[tuple[int, int], ...]
_PAIRS = "last, proportional, or pairs [[student, teacher], ...] counted from 0, or from the end with -1"


class FeatureConfig(ObjectiveSection):
    weight: Weight = Field(0.0, description="weight of matching hidden states; 0: not computed at all")
    kind: Literal["mse", "cosine"] = Field(
        "mse", description="mse: squared error over the teacher's own square; cosine: direction alone"
    )
    layers: LayerMap = Field("last", description=f"which layers are matched: {_PAIRS}")


class LayerwiseConfig(FeatureConfig):
    weight: Weight = Field(0.0, description="weight of matching layer by layer; 0: not computed at all")
    layers: LayerMap = Field("proportional", description=f"which layers are matched: {_PAIRS}")


class AttentionConfig(ObjectiveSection):
    weight: Weight = Field(0.0, description="weight of matching attention maps; 0: not computed at all")
    layers: LayerMap = Field("proportional", description=f"which layers are matched: {_PAIRS}")
    attention_layers: Count = Field(
        2, description="at most so many pairs, the last ones; each keeps [rows, heads, length, length]; 0: none"
    )

    @property
    def used_weight(self) -> Scalar:
        return self.weight if self.attention_layers else 0.0


class ContrastiveConfig(ObjectiveSection):
    weight: Weight = Field(0.0, description="weight of telling the batch's rows apart; 0: not computed at all")
    layers: LayerMap = Field("last", description=f"which layers are pooled: {_PAIRS}")
    temperature: Positive = Field(0.1, description="sharpness of the comparison between rows")


class AlmConfig(ObjectiveSection):
    looks_inside = False
    compares_spans = True

    weight: Weight = Field(0.0, description="weight of matching the likelihoods of spans, for two tokenizers")
    temperature: Annotated[Scalar, between(1.0, MOST_FLOAT)] = Field(
        100.0, description="both likelihoods are raised to 1 / temperature, and the term is multiplied by it"
    )
    divergence: Literal["kl", "total_variation"] = Field(
        "kl", description="between the teacher's and the student's probability that this span comes, or another"
    )


class ExactMatchConfig(ObjectiveSection):
    looks_inside = False
    compares_spans = True

    weight: Weight = Field(
        0.0, description="weight of forward KL over tokens of the same bytes, all others being one, for two tokenizers"
    )


class PrefixMatchConfig(ObjectiveSection):
    looks_inside = False
    compares_spans = True

    weight: Weight = Field(
        0.0,
        description="weight of forward KL over groups of tokens that begin a text alike, wherever a span begins, for "
        "two tokenizers",
    )


class UldConfig(ObjectiveSection):
    looks_inside = False
    compares_spans = True

    weight: Weight = Field(0.0, description="weight of the distance of sorted probabilities, for two tokenizers")


class SpanHiddenConfig(ObjectiveSection):
    compares_spans = True

    weight: Weight = Field(0.0, description="weight of matching mean hidden states of spans, for two tokenizers")
    kind: Literal["mse", "cosine"] = Field("cosine", description="as in objectives.feature")
    layers: LayerMap = Field("last", description=f"which layers are matched: {_PAIRS}")


class ObjectivesConfig(Section):
    """Built-in objectives, and those of other packages under their names."""

    model_config = ConfigDict(extra="allow")

    kd: KdConfig = Field(default_factory=KdConfig)
    ce: CeConfig = Field(default_factory=CeConfig)
    feature: FeatureConfig = Field(default_factory=FeatureConfig)
    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    layerwise: LayerwiseConfig = Field(default_factory=LayerwiseConfig)
    contrastive: ContrastiveConfig = Field(default_factory=ContrastiveConfig)
    alm: AlmConfig = Field(default_factory=AlmConfig)
    exact_match: ExactMatchConfig = Field(default_factory=ExactMatchConfig)
    prefix_match: PrefixMatchConfig = Field(default_factory=PrefixMatchConfig)
    uld: UldConfig = Field(default_factory=UldConfig)
    span_hidden: SpanHiddenConfig = Field(default_factory=SpanHiddenConfig)
    chunk_tokens: Count = Field(
        0,
        description="positions the head handles at once; 0: chosen from the vocabulary, on a GPU from its free memory",
    )
    kernel: Literal["auto", "plain", "compiled"] = Field(
        "auto",
        description="rows of the head: compiled (C++ on a CPU, torch.compile on a GPU) where that is possible and "
        "agrees, else plain PyTorch",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _read_registered(cls, table: Any, read_own: ModelWrapValidatorHandler[ObjectivesConfig]) -> ObjectivesConfig:
        """Validate the section of each registered objective by its own class; refuse an unknown name."""
        if not isinstance(table, Mapping):
            return read_own(table)
        read = {name: value for name, value in table.items() if name in cls.model_fields}
        problems: list[InitErrorDetails] = []
        for name in (name for name in table if name not in read):
            if name not in OBJECTIVES:
                problems.append({"type": "extra_forbidden", "loc": (name,), "input": table[name]})
                continue
            try:
                read[name] = OBJECTIVES.find(name).section.model_validate(table[name])
            except ValidationError as error:
                problems += [_placed(problem, name) for problem in error.errors()]
        if not problems:
            return read_own(read)
        try:
            read_own(read)  # to report the errors of built-in sections too
        except ValidationError as error:
            problems += [_placed(problem) for problem in error.errors()]
        raise ValidationError.from_exception_data(cls.__name__, problems)

    @property
    def sections(self) -> dict[str, ObjectiveSection]:
        """Every objective's section, built-in ones first."""
        own = {name: getattr(self, name) for name in type(self).model_fields}
        fields = {**own, **(self.model_extra or {})}
        return {name: section for name, section in fields.items() if isinstance(section, ObjectiveSection)}

    @property
    def weights(self) -> dict[str, Scalar]:
        """Weights of `kd` and `ce`, and of other objectives whose weight is not constantly 0."""
        weights = {name: section.used_weight for name, section in self.sections.items()}
        return {name: weight for name, weight in weights.items() if name in ("kd", "ce") or weight != 0.0}

    @property
    def moving(self) -> list[str]:
        """The objectives whose weight or settings change during the run."""

        def settings(name: str) -> dict[str, Any]:
            # A ramp by default, which only taid reads.
            is_read = name != "kd" or self.kd.divergence == "taid"
            own = self.sections[name].settings
            return {key: value for key, value in own.items() if is_read or key != "interpolation"}

        return [
            name
            for name, weight in self.weights.items()
            if any(isinstance(value, Ramp) for value in (weight, *settings(name).values()))
        ]

    @property
    def asks_teacher(self) -> bool:
        """Whether an objective needs the teacher's answers at any time of the run."""
        return any(weight != 0.0 and self.sections[name].needs_teacher for name, weight in self.weights.items())

    @property
    def inner_weights(self) -> dict[str, Scalar]:
        """The weights of objectives that use hidden states or attention maps."""
        return {name: weight for name, weight in self.weights.items() if self.sections[name].looks_inside}

    @property
    def span_weights(self) -> dict[str, Scalar]:
        """The weights of objectives that compare spans of two tokenizers."""
        return {name: weight for name, weight in self.weights.items() if self.sections[name].compares_spans}


def _placed(problem: Any, *name: str) -> InitErrorDetails:
    """An error of a section, with the objective's name before its location."""
    placed: InitErrorDetails = {"type": problem["type"], "loc": (*name, *problem["loc"]), "input": problem["input"]}
    if "ctx" in problem:
        placed["ctx"] = problem["ctx"]
    return placed


# -- training ---------------------------------------------------------------------------------------------
# [train], [curriculum], [precision], [guard], [eval], [checkpoint] and [telemetry].

Strategy = Literal["auto", "ddp", "fsdp"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


class TrainConfig(Section):
    max_steps: Count = Field(0, description="optimizer steps; 0: as many as `epochs` give")
    epochs: Annotated[float, Field(gt=0, le=10**6)] = Field(1.0, description="passes over the training data")
    batch_size: Rows | Literal["auto"] = Field(
        8,
        description="rows in a micro-batch; auto: `step_rows` in the largest micro-batches that fit, "
        "as `stillroom plan` counts",
    )
    step_rows: Rows = Field(32, description="rows in a step where batch_size is auto")
    gradient_accumulation_steps: Rows = Field(1, description="micro-batches in a step")
    learning_rate: Positive = Field(1e-3, description="peak learning rate of the student")
    router_learning_rate: NonNegative = Field(0.0, description="0: the student's")
    projector_learning_rate: NonNegative = Field(
        0.0, description="peak rate of the matrices that inner objectives train with the student; 0: the student's"
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="how the learning rate falls after the warm-up; cosine ends low, slowly; wsd (warm-up, stable, "
        "decay) stays at its peak and falls by one minus the square root in the last `decay_ratio` of the run",
    )
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="of wsd: share of the optimizer steps in which the rate falls"
    )
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.1, description="end of the schedule")
    warmup_steps: Count = Field(0, description="optimizer steps; overrides warmup_ratio")
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="share of the optimizer steps")
    max_warmup_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the optimizer steps that the warm-up takes at most, whatever warmup_steps says"
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon: the matrices of the layers follow their orthogonalised momentum, of about AdamW's size; "
        "embeddings, head, vectors, gates and projectors stay with AdamW",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="of Muon: memory of the gradient")
    weight_decay: NonNegative = Field(
        0.01, description="of AdamW and Muon, on matrices alone; more where the data is seen often"
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="of AdamW: memory of the gradient")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.95, description="of AdamW: memory of its square; shorter than 0.999, so that one spike is soon forgotten"
    )
    epsilon: Positive = Field(1e-8, description="of AdamW; always used in FP32")
    max_grad_norm: Positive = Field(
        1.0,
        description="the student's gradient as a whole is clipped to this norm; projectors and trained gates, which "
        "have their own rates, are clipped to the same norm separately",
    )
    eval_steps: Count = Field(
        0, description="0: up to ten evaluations over the run, fewer where they would take more than a tenth of it"
    )
    save_steps: Count = Field(
        0, description="0: with eval_steps, else up to ten checkpoints that take at most a twentieth of the time"
    )
    compile: Literal["auto", "off", "student", "both"] = Field(
        "auto",
        description="torch.compile for the student, or for both models; auto, in a run that is long enough to be worth "
        "it: the student on a CPU, both on a GPU of compute capability 7.0 or more",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="random seed: initial weights, order of the data, stochastic rounding"
    )
    early_stopping: Count = Field(0, description="stop after this many evaluations without a better student; 0: never")
    max_minutes: Annotated[float, Field(ge=0, le=MOST_MINUTES)] = Field(
        0.0,
        description="checkpoint and stop after N minutes, loading and saving included; exit code 75; 0: no limit",
    )
    strategy: Strategy = Field(
        "auto",
        description="with several processes: ddp, each has the whole student; fsdp, each has a part of its weights and "
        "optimizer state; auto: ddp",
    )
    shard_size: Count = Field(
        0,
        description="with fsdp: processes that hold the parts of one copy of the student; the number of processes must "
        "be a multiple of it, and each further group has another copy. 0: all processes hold one copy",
    )
    peer_timeout_minutes: Annotated[float, Field(gt=0, le=MOST_MINUTES)] = Field(
        30.0, description="with several processes: how long one waits for another before the run ends with exit code 75"
    )

    @property
    def rows_per_batch(self) -> int:
        """Rows in a batch of the loader; where memory is short it is taken in parts."""
        return self.step_rows if self.batch_size == "auto" else self.batch_size

    @model_validator(mode="after")
    def _shards_something(self) -> TrainConfig:
        if self.shard_size and self.strategy != "fsdp":
            raise ValueError(f"shard_size divides a sharded student: set strategy = 'fsdp', it is {self.strategy!r}")
        if self.shard_size == 1:
            raise ValueError("shard_size = 1 gives every process a whole student: set strategy = 'ddp'")
        return self

    @model_validator(mode="after")
    def _auto_decides_accumulation(self) -> TrainConfig:
        if self.batch_size == "auto" and self.gradient_accumulation_steps != 1:
            raise ValueError(
                "batch_size = auto decides how many micro-batches a step has: leave "
                "gradient_accumulation_steps out and set step_rows"
            )
        return self


class PhaseConfig(Section):
    name: str = Field(description="as log and report show it")
    until: Annotated[float, Field(gt=0, le=1)] = Field(description="progress at which the phase ends")


class CurriculumConfig(Section):
    phases: tuple[PhaseConfig, ...] = Field((), description="names for stretches of the run, for log and report")

    @model_validator(mode="after")
    def _in_order(self) -> CurriculumConfig:
        ends = [phase.until for phase in self.phases]
        if ends != sorted(ends):
            raise ValueError("phases must be listed in the order in which they end")
        return self


PrecisionMode = Literal["auto", "fp32", "bf16-mixed", "fp16-mixed", "fp16-master", "fp16-split", "fp16-sr"]


class PrecisionConfig(Section):
    mode: PrecisionMode = Field(
        "auto",
        description="chosen from what the device can natively do; on a CPU fp32, or bf16-mixed for a student of 20 "
        "million parameters or more whose products a one-second measurement shows to be faster in BF16",
    )
    moments: Literal["float32", "bfloat16", "int8"] = Field(
        "float32",
        description="storage of the optimizer's moments; bfloat16 and int8 (codes of matrices with a scale for each "
        "256) are rounded stochastically and need no unit of that kind",
    )
    initial_loss_scale: Annotated[float, Field(ge=1, le=MOST_FLOAT)] = Field(
        65536.0, description="the largest to begin with: one backward pass before the first step finds what fits"
    )
    loss_scale_growth_steps: Size = Field(
        2000,
        description="good steps before it doubles. Where batch after batch overflows at 1, the run stops with "
        "exit code 23",
    )


class GuardConfig(Section):
    on_nonfinite: Literal["recover", "halt"] = Field(
        "recover", description="halt: stop at the first value that is not finite"
    )
    max_consecutive: Size = Field(20, description="refused steps in a row before the run stops")
    max_retries: Count = Field(
        3, description="smaller loss scales tried on one batch; at the smallest, batches in a row that may overflow"
    )
    max_skip_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.10, description="share of the last 200 attempts that may be refused before the run stops, exit code 21"
    )
    spike_z: Positive = Field(
        6.0, description="robust standard deviations above the median at which a loss or norm is examined"
    )
    skip_grad_norm: NonNegative = Field(
        0.0,
        description="0: off. Harmful: a step is skipped whose gradient norm before clipping is above this, whatever "
        "the run's norms are; spike_z follows them",
    )
    max_rollbacks: Count = Field(5, description="returns to a good state before the run stops")
    on_exhausted: Literal["halt", "reset"] = Field(
        "halt", description="reset: begin again from the initial weights once when the rollbacks are spent"
    )
    snapshot_steps: Size = Field(
        50,
        description="applied steps between snapshots; before the first, the state is examined after 1, 2, 4, 8 ...",
    )
    snapshot_ring: Size = Field(2, description="snapshots kept in memory")
    fallback_after: Size = Field(
        20, description="steps in a row with the teacher at fault before a stretch of cross-entropy alone"
    )
    fallback_steps: Size = Field(50, description="length of that stretch")
    logit_clamp: NonNegative = Field(
        0.0, description="0: off. Harmful: puts a floor under the perplexity, which is printed"
    )
    loss_clamp: NonNegative = Field(0.0, description="0: off. Harmful: the gradient of a clamped loss is zero")


SELECT_TEXT = ("exact_match", "checker", "own_kl")  # what is chosen by is what the student writes
DEFAULT_PROMPTS = 32


class EvalConfig(Section):
    select: Literal["perplexity", "objective", "exact_match", "checker", "own_kl", "tasks"] = Field(
        "perplexity",
        description="what the best student, early stopping and exit code 22 go by, on held-out data. objective: the "
        "training objective; exact_match: answers to prompts that equal the record's; checker: those that eval.checker "
        "finds right; own_kl: mean KL(student, teacher) on the student's own answers; tasks: mean score of eval.tasks",
    )
    prompts: Count = Field(
        0,
        description="held-out prompts that the student answers at each evaluation; 0: none, or 32 where eval.select "
        "needs them",
    )
    prompt_tokens: Size = Field(64, description="the longest answer to such a prompt, in tokens")
    temperature: NonNegative = Field(
        0.0, description="of these answers: as the student will be used; 0: the most probable token"
    )
    checker: Checker = Field(
        "exact", description="which of these answers are right: exact, number, json, regex:PATTERN, or a package's"
    )
    tasks: tuple[str, ...] = Field(
        (), description="benchmarks of lm-eval, by name or YAML file, run at each evaluation; for eval.select = 'tasks'"
    )
    max_batches: Count | Literal["auto"] = Field(
        "auto",
        description="batches in an evaluation, of rows evenly spread over the held-out data; 0: all of it; auto: as "
        "many as the run's budget allows: all that is done next to the steps takes a tenth of their work, more in runs "
        "of a few minutes",
    )
    batch_size: Annotated[int, Field(ge=0, le=MOST_ROWS)] = Field(0, description="rows; 0: as in training")
    max_perplexity: NonNegative = Field(
        0.0, description="a check of the result: held-out perplexity below this; 0: below the untrained student's"
    )
    min_share: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.01, description="a check of the result: the least share of the objective for a term that has a weight"
    )
    samples: Count = Field(3, description="texts continued by teacher and student in the report")
    sample_tokens: Size = Field(48, description="tokens of each continuation")

    @property
    def limit(self) -> int:
        """Batches in an evaluation where nothing plans them; 0: all."""
        return 0 if self.max_batches == "auto" else self.max_batches

    @property
    def num_prompts(self) -> int:
        """How many prompts are answered at each evaluation."""
        return self.prompts or (DEFAULT_PROMPTS if self.select in SELECT_TEXT else 0)

    @model_validator(mode="after")
    def _has_tasks(self) -> EvalConfig:
        if (self.select == "tasks") != bool(self.tasks):
            raise ValueError("eval.tasks and eval.select = 'tasks' go together: set both, or neither")
        return self


class WriteConfig(Section):
    """What `stillroom write` lets the teacher write, and what is kept of it."""

    start: Literal["prompts", "documents", "template"] = Field(
        "prompts",
        description="what is continued. prompts: those of the records; documents: the beginnings of texts; template: "
        "nothing but the chat template's opening of a question, so that the model writes the questions too",
    )
    prompts: str | None = Field(None, description="data that has the prompts or documents; none: data.train")
    max_prompts: Count = Field(0, description="prompts at most; 0: all. With start = 'template': how many questions")
    start_tokens: Size = Field(32, description="tokens of a document that are given, with start = 'documents'")
    raw: bool = Field(
        False, description="continue prompts as they stand, without the chat template that the writer may have"
    )
    samples: Annotated[int, Field(ge=1, le=1024)] = Field(1, description="answers to each prompt")
    max_new_tokens: Size = Field(256, description="the longest answer, in tokens")
    temperature: NonNegative = Field(1.0, description="0: the most probable token")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="draw from the fewest most probable tokens that have this share"
    )
    seed: Count = Field(0, description="of all draws; each prompt and sample has its own")
    batch_size: Annotated[int, Field(ge=1, le=MOST_ROWS)] = Field(
        32, description="answers written at once, and kept together where the command is killed"
    )
    checker: Checker | None = Field(
        None, description="which answers are right: exact, number, json, regex:PATTERN, or a package's"
    )
    keep: Literal["all", "right", "best"] = Field(
        "all", description="right: drop answers that write.checker finds wrong; best: the best answer to each prompt"
    )

    @model_validator(mode="after")
    def _is_whole(self) -> WriteConfig:
        if self.keep == "right" and self.checker is None:
            raise ValueError("write.keep = 'right' needs write.checker")
        if self.start == "template" and not self.max_prompts:
            raise ValueError("write.start = 'template' has no end by itself: set write.max_prompts")
        if self.start == "template" and self.raw:
            raise ValueError("write.start = 'template' is printed by the chat template: leave write.raw out")
        if self.samples > 1 and self.temperature == 0.0:
            raise ValueError("write.samples at temperature 0 are all the same: raise write.temperature")
        return self


class CheckpointConfig(Section):
    keep: Size = Field(2, description="checkpoints kept on disk")
    background: Literal["auto", "on", "off"] = Field(
        "auto",
        description="write checkpoints while training continues, from a copy of weights and moments in main memory; "
        "auto: where that copy and the snapshots together take at most 0.4 of the free main memory",
    )


class TelemetryConfig(Section):
    log_steps: Size = Field(10, description="steps between lines in a pipe, with --verbose; else a line a minute")
    gradient_steps: Count = Field(
        0, description="steps between measurements of each term's gradient; 0: never. Costs a backward pass a term"
    )
    tracker: Literal["none", "tensorboard", "trackio", "wandb"] = Field(
        "none",
        description="also log to this tracker, where it is installed; a tracker that fails does not stop the run",
    )


# -- rollouts ---------------------------------------------------------------------------------------------
# [rollouts]: text that the student writes in rounds, and learns on from the teacher.


class RolloutsConfig(Section):
    """Rounds of the student's own text. Without this section there are none."""

    prompts: str = Field(
        "train",
        description="what is answered: train, the prompts of the training records (of plain text, the beginning of "
        "each row); or a file, glob or hf:NAME as in data.eval",
    )
    share: Share = Field(
        Ramp(start=0.0, end=0.5, begin=0.25, until=0.25),
        description="share of a window's micro-batches that are rollouts; a ramp begins on the data alone",
    )
    every: Count = Field(
        16,
        description="windows that a round serves. 1: each step learns on text of the present student; 0: one round "
        "for the whole run, written when the share is first above 0",
    )
    keep_rounds: Annotated[int, Field(ge=0, le=64)] = Field(
        0, description="older rounds whose rows are used again, in equal parts with the new ones"
    )
    samples: Annotated[int, Field(ge=1, le=1024)] = Field(1, description="answers to each prompt of a round")
    max_new_tokens: Annotated[Scalar, between(1, MOST_TOKENS)] = Field(
        128, description="tokens of an answer, the end token included; a ramp lets answers grow"
    )
    prompt_tokens: Size = Field(
        32, description="tokens of a row of plain text that are its prompt; at most half of the row"
    )
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=MOST_FLOAT)] = Field(
        1.0, description="of the student while it writes; the temperature of the loss is objectives.kd.temperature"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the probability that tokens are drawn from; 1: all of it"
    )
    batch_size: Rows = Field(32, description="answers written at once; another size may change a round's text")
    answers: Literal["live", "stored"] = Field(
        "live",
        description="live: the teacher is asked in each step; stored: once for a whole round, and its answers are "
        "kept with it as a few tokens and the exact mass of the rest",
    )
    teacher_top: Annotated[int, Field(ge=1, le=4096)] = Field(
        32, description="of stored answers: the teacher's most probable tokens that are kept at each position"
    )
    student_top: Annotated[int, Field(ge=0, le=4096)] = Field(
        16, description="of stored answers: the student's most probable tokens that are kept too"
    )
    on_loop: Literal["cut", "keep", "drop"] = Field(
        "cut",
        description="a phrase that stands four times in a row over 16 tokens or more. cut: the answer ends there; "
        "keep: it continues; drop: the answer is left out",
    )

    @property
    def most_new_tokens(self) -> int:
        """The longest answer of the whole run."""
        return round(max(ends(self.max_new_tokens)))

    @model_validator(mode="after")
    def _is_used(self) -> RolloutsConfig:
        if max(ends(self.share)) == 0.0:
            raise ValueError("rollouts.share is 0 throughout: raise it, or leave [rollouts] out")
        return self


# -- config -----------------------------------------------------------------------------------------------
# All sections, and what cannot be set together.


class Config(Section):
    """The configuration of a run."""

    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    student: StudentConfig = Field(default_factory=StudentConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    objectives: ObjectivesConfig = Field(default_factory=ObjectivesConfig)
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    rollouts: RolloutsConfig | None = Field(None, description="let the student write, and learn from the teacher there")
    write: WriteConfig = Field(default_factory=WriteConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)

    _given: frozenset[str] = PrivateAttr(frozenset())

    @model_validator(mode="before")
    @classmethod
    def _teaches_itself(cls, values: Any) -> Any:
        """A student that is trained for a quantised file learns from its unquantised self, unless told otherwise."""
        if not isinstance(values, dict):
            return values
        student, teacher = values.get("student"), values.get("teacher") or {}
        if not isinstance(student, dict) or not isinstance(teacher, dict):
            return values
        is_alone = not any(teacher.get(key) for key in ("model", "server", "cache")) and student.get("init") != "shrink"
        if student.get("quantise") and student.get("model") and is_alone:
            return {**values, "teacher": {**teacher, "model": student["model"]}}
        return values

    @property
    def given(self) -> frozenset[str]:
        """Dotted keys that a person set, not a preset or a default. Empty for a configuration read from a run."""
        return self._given

    def with_given(self, keys: Iterable[str]) -> Config:
        """A copy that knows which of its settings were given."""
        copy = self.model_copy()
        copy._given = frozenset(keys)
        return copy

    def __eq__(self, other: object) -> bool:
        """Compare the settings alone: who gave them makes no difference to a run."""
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    @model_validator(mode="after")
    def _possible(self) -> Config:
        kd, ce = self.objectives.kd.weight, self.objectives.ce.weight
        if kd == 0.0 and ce == 0.0:
            raise ValueError("objectives.kd.weight and objectives.ce.weight are both 0: there is nothing to learn")
        inner = self.objectives.inner_weights
        if inner and self.teacher.cache:
            raise ValueError(
                f"{' and '.join(inner)} look inside the teacher, and teacher.cache holds only its answers: set "
                + " and ".join(f"objectives.{name}.weight = 0" for name in inner)
                + ", or leave teacher.cache out"
            )
        if inner and self.teacher.signal.kind not in ("auto", "dense"):
            raise ValueError(f"{' and '.join(inner)} look inside the teacher: set teacher.signal.kind = 'dense'")
        if self.student.vocabulary == "teacher" and self.objectives.span_weights:
            spans = list(self.objectives.span_weights)
            raise ValueError(
                f"{' and '.join(spans)} compare two tokenizers, and student.vocabulary = 'teacher' leaves one: set "
                + " and ".join(f"objectives.{name}.weight = 0" for name in spans)
                + " and objectives.kd.weight, or leave student.vocabulary out"
            )
        if self.teacher.server and (inner or self.student.init == "shrink"):
            what = f"{' and '.join(inner)} look inside the teacher" if inner else "student.init = 'shrink' cuts it"
            raise ValueError(f"{what}, and teacher.server gives only its answers: leave teacher.server out")
        if self.student.init == "shrink" and self.teacher.placement == "stream":
            raise ValueError(
                "student.init = 'shrink' cuts the student from the whole teacher: set teacher.placement = 'device' or "
                "'offload'"
            )
        if self.teacher.placement == "shard":
            self._refuse_uneven_questions()
        if self.teacher.is_student:
            self._refuse_with_student_as_teacher()
        if self.data.teacher_prefix and (problem := self.no_contexts()):
            raise ValueError(f"data.teacher_prefix: {problem}")
        if self.data.source_teachers and (problem := self._no_source_teachers()):
            raise ValueError(f"data.train[].teacher: {problem}")
        if self.rollouts is not None:
            self._refuse_with_rollouts(self.rollouts)
        self._selectable()
        if self.train.optimizer == "muon":
            self._refuse_with_muon()
        is_whole = self.train.max_warmup_share == 1.0  # else the warm-up is cut to that share
        if is_whole and self.train.max_steps and self.train.warmup_steps >= self.train.max_steps:
            raise ValueError(
                f"train.warmup_steps {self.train.warmup_steps} leaves nothing of train.max_steps {self.train.max_steps}"
            )
        return self

    def _selectable(self) -> None:
        """What the student cannot be chosen by."""
        select = self.eval.select
        if select == "own_kl" and (self.teacher.cache or self.teacher.server):
            raise ValueError(
                "eval.select = 'own_kl' asks the teacher about text that the student has just written: it needs the "
                "teacher's weights, leave teacher.cache and teacher.server out"
            )
        moving = self.objectives.moving
        if select == "objective" and moving:
            raise ValueError(
                f"eval.select = 'objective' compares several steps, and the objective {' and '.join(moving)} changes "
                "during the run: choose by perplexity, or set constants"
            )
        if self.train.strategy == "fsdp" and (self.eval.num_prompts or self.eval.tasks):
            raise ValueError(
                "a sharded student writes no text during a run: leave eval.prompts and eval.tasks out and choose by "
                "perplexity or objective, or set train.strategy = 'ddp'"
            )

    def _refuse_with_muon(self) -> None:
        if self.student.adapter is not None:
            raise ValueError(
                "train.optimizer = 'muon' has the matrices of the layers, and under student.adapter they are frozen: "
                "leave one of both out"
            )
        if self.teacher.router.mode == "sar-meta":
            raise ValueError(
                "teacher.router.mode = 'sar-meta' looks ahead by second moments, which Muon has not: set "
                "train.optimizer = 'adamw'"
            )

    def _refuse_with_student_as_teacher(self) -> None:
        model = self.teacher.model
        problems = {
            "is the frozen base under an adapter: set student.adapter, or teacher.model = 'ema'": (
                model == "self" and self.student.adapter is None
            ),
            "averages weights as they are trained, and student.quantise rounds them: leave one out": (
                model == "ema" and bool(self.student.quantise)
            ),
            "has the student's tokens: leave student.init = 'shrink' and student.vocabulary = 'teacher' out": (
                self.student.reads_as_teacher
            ),
            f"has the student's tokens: leave objectives {', '.join(self.objectives.span_weights)} out": (
                bool(self.objectives.span_weights)
            ),
            "runs the whole student outside of its step: set train.strategy = 'ddp' or 'single'": (
                self.train.strategy == "fsdp"
            ),
        }
        for problem in (problem for problem, is_there in problems.items() if is_there):
            raise ValueError(f"teacher.model = {model!r} {problem}")

    def no_contexts(self) -> str:
        """Why the teacher cannot read other text before a record than the student; empty where it can."""
        problems = {
            "it ends where the first scored token begins: set data.train_on_prompt = false": self.data.train_on_prompt,
            "a row of blocks holds several records: set data.packing = 'rows'": self.data.packing == "blocks",
            "objectives of spans give the teacher rows in its own tokens: leave "
            f"{', '.join(self.objectives.span_weights)} out": bool(self.objectives.span_weights),
            "layers are compared position by position, and the teacher's rows are longer: leave "
            f"{', '.join(self.objectives.inner_weights)} out": bool(self.objectives.inner_weights),
            "gates are changed on the student's rows: set teacher.router.mode = 'frozen'": (
                self.teacher.router.mode != "frozen"
            ),
            "[rollouts] make rows of prompts without it: leave one of both out": self.rollouts is not None,
            "eval.select = 'own_kl' asks the teacher without it: choose by objective": self.eval.select == "own_kl",
        }
        return next((problem for problem, is_there in problems.items() if is_there), "")

    def _no_source_teachers(self) -> str:
        problems = {
            "no objective asks a teacher: give objectives.kd.weight": not self.objectives.asks_teacher,
            f"they share the student's tokens: leave {', '.join(self.objectives.span_weights)} out": bool(
                self.objectives.span_weights
            ),
            f"layers of different teachers are not alike: leave {', '.join(self.objectives.inner_weights)} out": bool(
                self.objectives.inner_weights
            ),
            "they have the tokens of a student that is loaded: leave student.init = 'shrink' and student.vocabulary = "
            "'teacher' out": self.student.reads_as_teacher,
            "gates are changed for one teacher: set teacher.router.mode = 'frozen'": (
                self.teacher.router.mode != "frozen"
            ),
            "all processes must ask a sharded teacher as often: set teacher.placement = 'device'": (
                self.teacher.placement == "shard"
            ),
        }
        return next((problem for problem, is_there in problems.items() if is_there), "")

    def _refuse_uneven_questions(self) -> None:
        """All processes must ask a sharded teacher as often, or the others wait for the one that does not."""
        if self.data.label_sources:
            raise ValueError(
                "a source with objectives = 'labels' leaves some processes without a question to the teacher, and "
                "teacher.placement = 'shard' needs all of them: set teacher.placement = 'device'"
            )
        if self.telemetry.gradient_steps:
            raise ValueError(
                "telemetry.gradient_steps asks the teacher in some processes, and teacher.placement = 'shard' needs "
                "all of them: set telemetry.gradient_steps = 0"
            )

    def _refuse_with_rollouts(self, rollouts: RolloutsConfig) -> None:
        """Nobody answers the student's own text but the teacher: refuse what takes labels or other text for granted."""
        kd = self.objectives.kd
        problems = {
            "only the teacher says what is right there: give objectives.kd.weight": not self.objectives.asks_teacher,
            "a cache has no answers to text that is not written yet: leave teacher.cache out": bool(self.teacher.cache),
            "two tokenizers would read the student's tokens again: leave "
            + ", ".join(f"objectives.{name}" for name in self.objectives.span_weights)
            + " out": bool(self.objectives.span_weights),
            "its text has no labels to correct the teacher with: set objectives.kd.on_wrong_teacher = 'keep'": (
                kd.on_wrong_teacher != "keep"
            ),
            "gates are trained on a window ahead, which is not written yet: set teacher.router.mode = 'frozen'": (
                self.teacher.router.mode in TRAINING_MODES
            ),
            "prompts are told from answers by what is scored: set data.train_on_prompt = false": (
                self.data.train_on_prompt and rollouts.prompts == "train"
            ),
            "a student in parts cannot write: set train.strategy = 'ddp' or 'single'": self.train.strategy == "fsdp",
            f"answers of {rollouts.most_new_tokens} tokens leave no room for a prompt in data.max_length = "
            f"{self.data.max_length}: lower rollouts.max_new_tokens": rollouts.most_new_tokens >= self.data.max_length,
        }
        if rollouts.answers == "stored":
            inner = " and ".join(self.objectives.inner_weights)
            problems |= {
                f"{inner} look inside the teacher, and rollouts.answers = 'stored' keeps only its answers": bool(inner),
                "rollouts.answers = 'stored' needs the teacher's whole distribution, which a server does not give: set "
                "rollouts.answers = 'live'": bool(self.teacher.server),
                "stored answers leave some processes without a question to the teacher, and teacher.placement = "
                "'shard' needs all of them: set rollouts.answers = 'live'": self.teacher.placement == "shard",
                "stored answers have one temperature: set objectives.kd.temperature to a number and "
                "objectives.kd.token_temperature = 0, or rollouts.answers = 'live'": (
                    isinstance(kd.temperature, Ramp) or kd.token_temperature != 0.0
                ),
            }
        for problem, is_there in problems.items():
            if is_there:
                raise ValueError(f"[rollouts]: {problem}")

    @property
    def is_mixed(self) -> bool:
        """Whether rows of several sources are kept apart: of the data, or of data and rollouts."""
        return self.data.is_mixed or self.rollouts is not None

    @property
    def source_names(self) -> tuple[str, ...]:
        """The sources that a batch may name, rollouts included."""
        return (*self.data.source_names, *((ROLLOUTS,) if self.rollouts is not None else ()))

    def on_day(self, day: str) -> Config:
        """The same configuration with the day that chat templates print."""
        return self.model_copy(update={"data": self.data.model_copy(update={"day": day})})

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


# -- faults -----------------------------------------------------------------------------------------------
# The faults of `--inject`, and their syntax: fault@step, or fault@stepxN for N attempts.

FAULTS = {
    "nan_weight": "one weight of the student becomes NaN",
    "nan_embedding": "one weight becomes NaN in the row of a token that is hardly ever used",
    "huge_weight": "eight weights of the student become 30,000",
    "inf_logit": "one hidden value of the student becomes infinite",
    "teacher_nan": "the teacher answers NaN",
    "teacher_garbage": "the teacher answers finite nonsense",
    "router_nan": "one weight of a trained gate becomes NaN",
    "oom": "memory runs out in the student's forward",
    "all_masked": "no token of the batch is scored",
    "bad_batch": "the batch is random tokens",
    "inf_grad": "one gradient becomes infinite",
    "nan_grad": "one gradient becomes NaN",
    "nan_moment": "one moment of the optimizer becomes NaN",
    "lr_spike": "the learning rate is a thousand times too high",
    "disk_full": "the next checkpoint cannot be written",
    "kill": "the process is killed before the step, when its last checkpoint is whole",
    "freeze": "the process is stopped before the step and does not continue, as one that hangs",
    "kill_mid_update": "the process is killed while weights are written",
    "kill_while_writing": "the process is killed while a checkpoint's tensors are written",
    "kill_before_rename": "the process is killed before a checkpoint is renamed into place",
    "kill_after_rename": "the process is killed after a checkpoint was renamed into place",
    "kill_after_mark": "the process is killed after a rollback was noted on the disk, before anything was saved",
    "kill_while_retiring": "the process is killed while checkpoints that a rollback abandoned are removed",
    "kill_in_eval": "the process is killed during an evaluation",
}
_WORD = re.compile(r"^(?P<name>[a-z_]+)@(?P<step>\d{1,9})(?:x(?P<times>[1-9]\d{0,8}))?$")


@dataclass
class Fault:
    name: str
    step: int
    left: int


def parse(spec: str) -> list[Fault]:
    """Parse a list of faults such as `"nan_weight@40,teacher_nan@60x5"`."""
    faults = []
    for word in filter(None, (part.strip() for part in spec.split(","))):
        parts = _WORD.match(word)
        if not parts:
            raise ConfigError(f"--inject {word}: expected fault@step or fault@stepxN", advice=["nan_weight@40"])
        name = parts["name"]
        if name not in FAULTS:
            near = difflib.get_close_matches(name, FAULTS, n=1)
            raise ConfigError(
                f"--inject {word}: there is no fault {name!r}",
                advice=[f"did you mean {match}?" for match in near] + [f"faults: {', '.join(FAULTS)}"],
            )
        faults.append(Fault(name, int(parts["step"]), int(parts["times"] or 1)))
    return faults
