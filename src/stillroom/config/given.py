"""Settings that a person gave: which of them this run never reads, and which are missing next to them.

`Config.given` holds the dotted keys that came from a file, an option, `--set` or Python; those of a preset and the
schema's defaults are not among them. `RULES` says under which condition a key is read. A key without a rule is always
read; `tests/config/test_given_settings.py` lists those, so that a setting which is added gets a place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stillroom.config.schema import DIVERGENCES, TRAINING_MODES, Layout
from stillroom.core.errors import ConfigError

if TYPE_CHECKING:
    from stillroom.config.schema import Config

# -- what is never read -------------------------------------------------------------------------------------

# The settings of objectives.kd that each built-in divergence takes. Members import torch, so this is said twice.
DIVERGENCE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "jsd": ("beta",),
    "skew_forward_kl": ("alpha",),
    "skew_reverse_kl": ("alpha",),
    "alpha_beta": ("alpha", "beta"),
    "taid": ("interpolation",),
}


class Rule(NamedTuple):
    """Keys, with *, and the condition under which a run reads them. `reason` is why not otherwise; {c}: the config."""

    keys: str  # separated by spaces
    is_read: Callable[[Config], Any]
    reason: str

    def covers(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.keys.split())


def _is_loaded(c: Config) -> bool:
    """Whether the teacher's weights are loaded on this machine at any time."""
    if c.teacher.server:
        return False
    is_stored = c.teacher.cache not in (None, "auto") and c.teacher.signal.compare == "stored"
    return c.student.init == "shrink" or (c.objectives.asks_teacher and not is_stored)


def _needs_layout(c: Config) -> bool:
    """Whether any source has no layout of its own, held-out data included."""
    return bool(c.data.eval) or isinstance(c.data.train, str) or any(not one.has_layout for one in c.data.train)


def _reads_hub_data(c: Config) -> bool:
    return any(spec.startswith("hf:") for spec in (*(one.path for one in c.data.sources), c.data.eval or ""))


def _has_setting(setting: str) -> Callable[[Config], bool]:
    """Whether the chosen divergence takes a setting."""

    def is_read(c: Config) -> bool:
        name = c.objectives.kd.divergence
        if DIVERGENCES.is_built_in(name):
            return setting in DIVERGENCE_SETTINGS.get(name, ())
        # Of another package: known once it is imported.
        return setting in getattr(DIVERGENCES.loaded().get(name), "settings", (setting,))

    return is_read


_SAR_MODES = {"sar", "sar-joint", "sar-meta", "sar-transient"}
_ROUTER_MODE = "teacher.router.mode is {c.teacher.router.mode}"
_DIVERGENCE = "objectives.kd.divergence is {c.objectives.kd.divergence}, which has no "

RULES: tuple[Rule, ...] = (
    Rule("student.model student.revision", lambda c: c.student.init != "shrink", "the student is cut"),
    Rule("teacher.revision", lambda c: is_hub_id(c.teacher.model), "{c.teacher.model} is not a model of a hub"),
    Rule("student.revision", lambda c: is_hub_id(c.student.model), "{c.student.model} is not a model of a hub"),
    Rule(
        "teacher.cache teacher.server teacher.signal.* teacher.router.* teacher.requests.* "
        "guard.fallback_after guard.fallback_steps",
        lambda c: c.objectives.asks_teacher,
        "no objective asks the teacher",
    ),
    Rule("teacher.requests.*", lambda c: c.teacher.server, "teacher.server is not set"),
    Rule("teacher.placement teacher.quantisation teacher.max_quantisation_kl", _is_loaded, "the teacher is not loaded"),
    # A named cache is compared with the dtype that is asked for, so it is read there.
    Rule(
        "teacher.dtype",
        lambda c: _is_loaded(c) or (c.teacher.cache and not c.teacher.server),
        "the teacher is not loaded",
    ),
    Rule("teacher.max_quantisation_kl", lambda c: c.teacher.quantisation != "none", "teacher.quantisation is none"),
    Rule("teacher.signal.compare", lambda c: c.teacher.cache, "teacher.cache is not set"),
    Rule("teacher.router.patterns", lambda c: c.teacher.router.mode != "frozen", _ROUTER_MODE),
    Rule(
        "teacher.router.truth_weight teacher.router.gradient_checkpointing",
        lambda c: c.teacher.router.mode in TRAINING_MODES | {"sar-transient"},
        _ROUTER_MODE,
    ),
    Rule("teacher.router.student_weight", lambda c: c.teacher.router.mode in _SAR_MODES, _ROUTER_MODE),
    Rule(
        "teacher.router.anchor_weight teacher.router.load_balance_weight teacher.router.entropy_weight "
        "teacher.router.every teacher.router.max_degradation teacher.router.probe_* teacher.router.force "
        "train.router_learning_rate",
        lambda c: c.teacher.router.mode in TRAINING_MODES,
        _ROUTER_MODE,
    ),
    Rule(
        "teacher.router.probe_threshold teacher.router.force",
        lambda c: c.teacher.router.probe_steps,
        "teacher.router.probe_steps is 0",
    ),
    Rule("student.shrink.*", lambda c: c.student.init == "shrink", "student.init is {c.student.init}"),
    Rule(
        "student.shrink.method",
        lambda c: c.student.shrink.layers and isinstance(c.student.shrink.layers, int),
        "no layers are chosen",
    ),
    Rule(" ".join(f"data.{name}" for name in Layout.model_fields), _needs_layout, "every source has its own layout"),
    Rule("data.eval_share", lambda c: c.data.eval is None, "data.eval is the held-out data"),
    Rule("data.streaming", _reads_hub_data, "no data comes from a hub (hf:NAME)"),
    Rule("data.min_coverage", lambda c: c.objectives.span_weights, "no objective compares two tokenizers"),
    *(Rule(f"objectives.kd.{name}", _has_setting(name), _DIVERGENCE + name) for name in ("alpha", "beta")),
    Rule("objectives.kd.interpolation", _has_setting("interpolation"), _DIVERGENCE + "interpolation"),
    Rule(
        "objectives.kd.token_criterion",
        lambda c: c.objectives.kd.token_fraction != 1.0,
        "objectives.kd.token_fraction is 1",
    ),
    Rule("train.epochs", lambda c: not c.train.max_steps, "train.max_steps is {c.train.max_steps}"),
    Rule("train.step_rows", lambda c: c.train.batch_size == "auto", "train.batch_size is {c.train.batch_size}"),
    Rule("train.projector_learning_rate", lambda c: c.objectives.inner_weights, "no inner objective is used"),
    Rule("train.min_learning_rate_ratio", lambda c: c.train.schedule != "constant", "train.schedule is constant"),
    Rule("train.warmup_ratio", lambda c: not c.train.warmup_steps, "train.warmup_steps is {c.train.warmup_steps}"),
    Rule(
        "precision.*loss_scale*",
        lambda c: c.precision.mode not in ("fp32", "bf16-mixed"),
        "precision.mode is {c.precision.mode}",
    ),
    Rule("eval.sample_tokens", lambda c: c.eval.samples, "eval.samples is 0"),
)


def unread(config: Config) -> Iterator[tuple[str, str]]:
    """(key, why it is not read) of each setting that was given and that this run never reads."""
    for key in sorted(config.given):
        rule = next((rule for rule in RULES if rule.covers(key) and not rule.is_read(config)), None)
        why = rule.reason.format(c=config) if rule else _why_objective_is_off(key, config)
        if why:
            yield key, why


def _why_objective_is_off(key: str, config: Config) -> str:
    """Why a setting of an objective, built in or of another package, is not read: its weight is 0."""
    section, name, setting = [*key.split("."), "", ""][:3]
    if section != "objectives" or not setting or setting == "weight" or name not in config.objectives.sections:
        return ""
    found = config.objectives.sections[name]
    if setting == "attention_layers" and found.weight != 0.0:  # it is what switches the objective off
        return ""
    return f"objectives.{name}.weight is 0" if found.used_weight == 0.0 else ""


def unread_notes(config: Config) -> tuple[str, ...]:
    return tuple(f"{key} = {_shown(config, key)} is not read: {why}" for key, why in unread(config))


def refuse_unread(config: Config) -> None:
    """Raise for the first settings that were given and are not read, as `--strict` asks."""
    notes = unread_notes(config)
    if notes:
        raise ConfigError("; ".join(notes), where="--strict", advice=["leave them out", "leave --strict out"])


def _shown(config: Config, key: str) -> str:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def is_hub_id(name: str) -> bool:
    """Whether a model's name may be looked up on a hub: it is no file here, no path, no address, no builtin name."""
    try:
        is_here = Path(name).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        is_here = False
    return not is_here and not name.endswith(".gguf") and bool(_HUB_ID.fullmatch(name)) and not name.startswith(".")


# -- what is missing ----------------------------------------------------------------------------------------

# The setting of each part of a run, and the option that gives it.
ROLES = {
    "teacher": ("teacher.model", "--teacher"),
    "student": ("student.model", "--student"),
    "data": ("data.train", "--data"),
}


def refuse_gaps(config: Config, *, also: frozenset[str] = frozenset(), roles: tuple[str, ...] = tuple(ROLES)) -> None:
    """Raise if a model or data of the user's is named and another part is left to its embedded default.

    A preset may name the embedded parts, as `demo` does. `also` are roles given as objects. `roles` are those that a
    command uses.
    """
    given = {role for role, (key, _option) in ROLES.items() if role in also or _is_users_own(config, key)}
    given |= {"teacher.server"} & config.given
    if not given:
        return
    is_cut = config.student.init == "shrink"
    needed = {"teacher": is_cut or config.objectives.asks_teacher, "student": not is_cut, "data": True}
    missing = [role for role in roles if needed[role] and role not in also and not _is_named(config, ROLES[role][0])]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not given: {' and '.join(sorted(given))} of your own would be used with the "
            "embedded toys",
            where=", ".join(ROLES[role][0] for role in missing),
            advice=[
                " ".join(f"{ROLES[role][1]} {role.upper()}" for role in missing)
                + ", or "
                + " and ".join(ROLES[role][0] for role in missing)
                + " in the configuration",
                "the embedded ones by name: " + ", ".join(f"{ROLES[role][1]} {_TOYS[role]}" for role in missing),
            ],
        )


_TOYS = {"teacher": "builtin:teacher", "student": "builtin:student", "data": "builtin:stdlib"}


def _is_users_own(config: Config, key: str) -> bool:
    if key not in config.given:
        return False
    section, name = key.split(".")
    value = getattr(getattr(config, section), name)
    names = [value] if isinstance(value, str) else [source.path for source in value]
    return any(not one.startswith("builtin:") for one in names)


def _is_named(config: Config, key: str) -> bool:
    section, name = key.split(".")
    return name in getattr(config, section).model_fields_set
