"""Which signal a configuration asks for, and what it cannot be used with."""

from __future__ import annotations

import torch

from stillroom.config import Config
from stillroom.config.sections import Ramp
from stillroom.config.signal import DEFAULT_DRAWS, DEFAULT_HYBRID_DRAWS, DEFAULT_K, DEFAULT_M
from stillroom.curriculum import Curriculum
from stillroom.errors import ConfigError
from stillroom.precision.device import facts_of
from stillroom.precision.device import teacher_dtype as dtype_on
from stillroom.teachers.signals import SignalSpec

AUTO = "auto"  # teacher.cache: next to the run's folder, written on first use


def uses_cache(config: Config) -> bool:
    return bool(config.teacher.cache) and Curriculum.of(config).uses_teacher


def asks_server(config: Config) -> bool:
    return bool(config.teacher.server) and Curriculum.of(config).uses_teacher


def teacher_dtype(config: Config, device: torch.device) -> torch.dtype:
    return dtype_on(config.teacher.dtype, facts_of(device))


def live_spec(config: Config, shared: str = "") -> SignalSpec | None:
    """The signal of a live teacher; None: its whole distribution, which `objectives.kd.top_k` reduces in the head.

    `shared` names the tokens that both models have, where each has a tokenizer of its own.
    """
    if config.teacher.server:
        return served_spec(config)
    kind = config.teacher.signal.kind
    if kind in ("auto", "dense"):
        return None
    return _paired_spec(config, kind, shared) if config.objectives.span_weights else _spec(config, kind)


def cache_spec(config: Config, shared: str = "") -> SignalSpec:
    """The signal that a new cache of this configuration holds."""
    if config.teacher.server:
        return served_spec(config)
    kind = config.teacher.signal.kind
    if config.objectives.span_weights:
        return _paired_spec(config, kind, shared)
    if kind == "auto":
        kd = config.objectives.kd
        looks_at_distance = (kd.token_fraction != 1.0 and kd.token_criterion == "hellinger") or kd.token_temperature
        is_linear = kd.divergence == "forward_kl" and not kd.top_k and kd.on_wrong_teacher == "keep"
        kind = "hybrid" if is_linear and not looks_at_distance else "top_k"
    return _spec(config, kind)


def stored_spec(config: Config, there: SignalSpec, shared: str = "") -> SignalSpec:
    """What is asked of a cache that is there: where the configuration leaves it open, what the cache holds."""
    kd, signal = config.objectives.kd, config.teacher.signal
    if config.objectives.span_weights:
        if signal.kind != "auto":
            return _paired_spec(config, signal.kind, shared)
        shared = shared if _span_tokens(config) and there.kind != "target" else there.shared
        return SignalSpec(there.kind, there.exact, there.draws, 1.0, there.seed, True, shared)
    if signal.kind == "auto" and not kd.top_k:
        return SignalSpec(there.kind, there.exact, there.draws, _temperature(config), there.seed)
    return cache_spec(config)


def served_spec(config: Config) -> SignalSpec:
    """The signal of a teacher on a server: log-probabilities of its top tokens, at temperature 1."""
    kind = config.teacher.signal.kind
    spec = _spec(config, "renormalised" if kind == "renormalised" else "top_k")
    if spec.temperature != 1.0:
        raise ConfigError(
            f"a server gives log-probabilities of temperature 1, and objectives.kd.temperature is "
            f"{spec.temperature:g}: what the top tokens leave over there cannot be derived from them",
            where="objectives.kd.temperature",
            advice=["--set objectives.kd.temperature=1", "use a teacher on this machine"],
        )
    return spec


def _spec(config: Config, kind: str) -> SignalSpec:
    signal, seed = config.teacher.signal, config.teacher.signal.draw_seed
    temperature, top_k = _temperature(config), _top_k(config, kind)
    match kind:
        case "target":
            raise ConfigError(
                "teacher.signal.kind = 'target' keeps the probability of the target alone, which is for objectives.alm",
                where="teacher.signal.kind",
                advice=["leave it out: objectives.kd needs more of the distribution"],
            )
        case "top_k" | "renormalised":
            if signal.k and top_k and signal.k != top_k:
                raise ConfigError(
                    f"objectives.kd.top_k is {top_k} and teacher.signal.k is {signal.k}",
                    where="teacher.signal.k",
                    advice=["leave one of them out"],
                )
            k = signal.k or top_k or DEFAULT_K
            return SignalSpec("renormalised" if kind == "renormalised" else "top_k", k, 0, temperature)
        case "sampled":
            return SignalSpec("sampled", 0, signal.draws or DEFAULT_DRAWS, temperature, seed)
        case _:
            draws = signal.draws or DEFAULT_HYBRID_DRAWS
            return SignalSpec("hybrid", signal.m or DEFAULT_M, draws, temperature, seed)


def _paired_spec(config: Config, kind: str, shared: str) -> SignalSpec:
    """The signal for a student of another tokenizer, at temperature 1: likelihoods of spans are those of the models.

    Draws are unbiased, because what depends on the student in objectives.exact_match and objectives.prefix_match is
    linear in the teacher's probabilities.
    """
    signal, tokens = config.teacher.signal, _span_tokens(config)
    if len(tokens) > 1:
        raise ConfigError(
            f"objectives {' and '.join(tokens)} ask for different answers, and there is one of a few tokens",
            where="teacher.signal.kind, teacher.cache",
            advice=[*(f"set objectives.{name}.weight = 0" for name in tokens), "use the live teacher, which has all"],
        )
    if kind == "auto":
        kind = "hybrid" if tokens else "target"
    match kind:
        case "target":
            return SignalSpec("target", 0, 0, is_paired=True)
        case "top_k":
            return SignalSpec("top_k", signal.k or DEFAULT_K, 0, is_paired=True, shared=shared)
        case "sampled":
            return SignalSpec("sampled", 0, signal.draws or DEFAULT_DRAWS, 1.0, signal.draw_seed, True, shared)
        case "hybrid":
            draws = signal.draws or DEFAULT_HYBRID_DRAWS
            return SignalSpec("hybrid", signal.m or DEFAULT_M, draws, 1.0, signal.draw_seed, True, shared)
    raise ConfigError(
        f"teacher.signal.kind = {kind!r} does not go with two tokenizers: without the mass of its other tokens the "
        "teacher's distribution over the tokens that both have is biased",
        where="teacher.signal.kind",
        advice=["set it to 'hybrid' or 'top_k'", "set it to 'target' where objectives.alm is the only one"],
    )


def _span_tokens(config: Config) -> list[str]:
    """The objectives on spans that need more than the targets' probabilities."""
    return [name for name in config.objectives.span_weights if name in ("exact_match", "prefix_match")]


def _temperature(config: Config) -> float:
    found = config.objectives.kd.temperature
    if isinstance(found, Ramp):
        raise ConfigError(
            "a sparse signal has one temperature, and objectives.kd.temperature moves",
            where="objectives.kd.temperature",
            advice=["set it to a number", "use the live teacher with teacher.signal.kind = 'dense'"],
        )
    return float(found)


def _top_k(config: Config, kind: str) -> int:
    found = config.objectives.kd.top_k
    if isinstance(found, Ramp):
        raise ConfigError(
            "a stored signal has one k, and objectives.kd.top_k moves",
            where="objectives.kd.top_k",
            advice=["set it to a number", "use the live teacher with teacher.signal.kind = 'dense'"],
        )
    if found and kind in ("sampled", "hybrid"):
        raise ConfigError(
            f"objectives.kd.top_k asks for likely tokens and their tail, teacher.signal.kind = {kind!r} for draws",
            where="teacher.signal.kind",
            advice=["set objectives.kd.top_k = 0", "set teacher.signal.kind = 'top_k'"],
        )
    return int(found)


def check_use(config: Config, spec: SignalSpec) -> list[str]:
    """Refuse settings that would do nothing, or harm, with this signal. Answers with what should be said."""
    kd = config.objectives.kd
    if spec.is_paired:
        return _check_paired_use(config, spec)
    if spec.is_sampled and kd.token_fraction != 1.0 and kd.token_criterion == "hellinger":
        raise ConfigError(
            "the distance of teacher and student cannot be told from drawn tokens",
            where="objectives.kd.token_criterion",
            advice=["set it to 'entropy'", "set teacher.signal.kind = 'top_k'"],
        )
    if kd.on_wrong_teacher == "mft" or (kd.on_wrong_teacher == "label_residual" and spec.is_sampled):
        raise ConfigError(
            f"objectives.kd.on_wrong_teacher = {kd.on_wrong_teacher!r} does not go with answers of kind {spec.kind}",
            where="objectives.kd.on_wrong_teacher",
            advice=["set it to 'keep'", "label_residual goes with teacher.signal.kind = 'top_k'"],
        )
    if config.guard.logit_clamp:
        return ["guard.logit_clamp holds for the student alone: the teacher's answers are stored unclamped"]
    return []


def _check_paired_use(config: Config, spec: SignalSpec) -> list[str]:
    for name in _span_tokens(config) if spec.kind == "target" else ():
        raise ConfigError(
            f"objectives.{name} compares distributions, and answers of kind target hold one probability a token",
            where="teacher.signal.kind",
            advice=["set it to 'hybrid' or 'top_k'", f"set objectives.{name}.weight = 0"],
        )
    return []
