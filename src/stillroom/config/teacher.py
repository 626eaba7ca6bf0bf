"""The teacher's section of the configuration, and what every model's section has."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from stillroom.config.sections import MOST_FLOAT, MOST_MINUTES, Count, NonNegative, Positive, Section, Size

# -- served ----------------------------------------------------------------------------------------
# How a teacher on a server is asked: the `teacher.requests` section.


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
        raise ValueError("teacher.server is no address of a server: write http://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "teacher.server holds more than scheme, host, port and path, and a run's configuration is written to its "
            "folder: name a variable with the key in teacher.requests.api_key_variable"
        )


# -- signal ----------------------------------------------------------------------------------------
# What a teacher's answers are reduced to: the `teacher.signal` section.


SparseKind = Literal["top_k", "sampled", "hybrid", "renormalised", "target"]

DEFAULT_K = 64
DEFAULT_M = 8
DEFAULT_HYBRID_DRAWS = 12
DEFAULT_DRAWS = 50  # about twelve different tokens (Anshumann et al. 2025)


class SignalConfig(Section):
    kind: Literal["auto", "dense"] | SparseKind = Field(
        "auto",
        description="dense: all tokens; top_k: the k likeliest and the exact mass of the rest, for every divergence; "
        "sampled: drawn tokens; hybrid: the m likeliest and draws from the rest, unbiased for forward_kl; "
        "renormalised: k tokens as if no other could come, which is biased; target: the probability of the target "
        "alone, for objectives.alm. auto: dense live; what a cache holds; for a new cache top_k where "
        "objectives.kd.top_k is set or the divergence is not forward_kl, else hybrid; with two tokenizers hybrid for "
        "objectives.prefix_match or exact_match, else target",
    )
    k: Size | None = Field(None, description="of top_k (64, or objectives.kd.top_k)")
    m: Size | None = Field(None, description="of hybrid (8)")
    draws: Annotated[int, Field(ge=1, le=255)] | None = Field(None, description="of hybrid (12) and sampled (50)")
    draw_seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="of the draws, beside the content of each row"
    )

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
    augmentation_passes: Size = Field(2, description="teacher passes of knowledge-augmentation")
    augmentation_lambda: Annotated[float, Field(ge=0, le=1)] = Field(
        0.05, description="share of tokens whose experts are drawn instead of chosen in knowledge-augmentation"
    )
    offset_bound: Positive = Field(0.5, description="length of a token's gate offset in sar-transient, in gate logits")
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


class TeacherConfig(ModelSection):
    model: str = Field(
        "builtin:teacher",
        description="folder, hub id, GGUF file, LoRA adapter folder, builtin:teacher or builtin:moe-teacher",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="storage of the teacher's weights; auto: float32 on a CPU, bfloat16 on a card with native bf16, "
        "float16 on any other",
    )
    placement: Literal["device", "offload", "stream", "shard"] = Field(
        "device",
        description="offload: weights live in main memory and visit the device while they answer; stream: layers stay "
        "in the teacher's files and come to the device one at a time, at most two of them at once; shard: each of "
        "several processes holds a part of every weight, and a layer is gathered for its forward",
    )
    quantisation: Literal["none", "int8", "bnb-8bit", "bnb-4bit"] = Field(
        "none",
        description="bits of the teacher's linear layers; the head stays as it is. int8: by torchao, on any device; "
        "bnb-8bit, bnb-4bit: by bitsandbytes, on a CUDA card",
    )
    max_quantisation_kl: Positive = Field(
        0.05,
        description="nats a token that quantisation may change the teacher's answers by, KL(full || quantised) on rows "
        "of the data; above it the run is refused, because the student would learn that error as if the teacher had "
        "meant it. At 0.05 at most 16 % of a distribution lies elsewhere (Pinsker's inequality)",
    )
    cache: str | None = Field(
        None,
        description="folder written by `stillroom cache`: the teacher is then not loaded. auto: a folder beside the "
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
                "likeliest tokens: set teacher.signal.kind = 'top_k'"
            )
        return self
