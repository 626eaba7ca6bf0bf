"""The table of rules, and the rules that judge settings.

A rule is a small function from evidence to findings. Its name is the stable code of what it finds. Its bounds are
constants, each written once. Rules are listed by the evidence they look at:

| evidence | where | asked by |
|---|---|---|
| settings | here | `doctor`, `diagnose` (of a configuration, and as hints after the findings of a run) |
| log | `log_rules` | `diagnose`, and the run itself after each evaluation and at its end |
| start, result | `checks` | the run itself, before its first step and after its last |
| setup | `setup_rules` | `doctor` |

What judges a schedule is one function that is in the table twice: `Case`, a run's record, is a `Settings` whose
schedule is the one that the run had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from stillroom.telemetry.wording import as_number, clean, format_count, format_lr, format_percent, section

Severity = Literal["problem", "warning", "hint", "fine"]
Evidence = Literal["settings", "log", "start", "result", "setup"]

# problem: the result is lost or harmed; warning: it could be better, or means less than it seems; hint: it costs time,
# or is worth knowing; fine: what was looked at is as it should be.
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "hint", "fine")
_LEVELS = {"problem": "red", "warning": "amber", "hint": "amber", "fine": "green"}


@dataclass(frozen=True)
class Finding:
    """One cause, with its evidence and what to do. `setting` is a value for --set; empty where no setting helps.

    `otherwise` is the advice for a run that has this setting already. `cause` and `subject` are those of the rule.
    """

    severity: Severity
    evidence: str
    advice: str = ""
    setting: str = ""
    steps: tuple[int, ...] = ()
    otherwise: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    cause: str = ""
    subject: str = ""
    is_root: bool = False  # its evidence does not follow from any other finding

    def __post_init__(self) -> None:
        if self.severity != "fine" and not self.advice:
            raise ValueError(f"nothing to try: {self.evidence}")

    @property
    def is_alarming(self) -> bool:
        return self.severity in ("problem", "warning")

    @property
    def level(self) -> str:
        """The doctor's word. green: sound; amber: works and could be better; red: fails, or gives a wrong student."""
        return _LEVELS[self.severity]

    @property
    def remedy(self) -> str:
        return f"{self.advice}: --set '{self.setting}'" if self.setting else self.advice

    def to_dict(self) -> dict[str, Any]:
        """As `diagnose`, `advice` events and summary.json have it."""
        return {
            "cause": self.cause,
            "severity": self.severity,
            "steps": list(self.steps),
            "evidence": self.evidence,
            "advice": self.remedy,
            "setting": self.setting,
            "numbers": dict(self.numbers),
        }


Judge = Callable[[Any], Iterable[Finding] | Finding | None]


@dataclass(frozen=True)
class Rule:
    """`explains`: the causes that follow from this one. `is_live`: worth saying while the run continues.

    `title`: the name of a check of a finished run, whose outcome is also shown where it passes. `subject`,
    `needs_config` and `is_slow` (loads models or tokenizes data) are for the doctor.
    """

    judge: Judge
    sees: Evidence
    explains: tuple[str, ...] = ()
    is_live: bool = True
    is_red: bool = False  # of settings: certain to fail or to mislead. Others may be right, so the doctor says amber
    title: str = ""
    subject: str = "configuration"
    needs_config: bool = True
    is_slow: bool = False

    @property
    def name(self) -> str:
        return self.judge.__name__

    def find(self, evidence: Any) -> Iterator[Finding]:
        found = self.judge(evidence)
        for one in [found] if isinstance(found, Finding) else found or ():
            yield replace(one, cause=one.cause or self.name, subject=self.subject)


TABLE: list[Rule] = []


def rule(sees: Evidence, **options: Any) -> Callable[[Judge], Judge]:
    """Add a function to the table, after those that are there: the order is that of a run, from data to end."""

    def add(judge: Judge) -> Judge:
        TABLE.append(Rule(judge, sees, **options))
        return judge

    return add


def rules_for(evidence: Evidence) -> list[Rule]:
    return [one for one in TABLE if one.sees == evidence]


def roots(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that do not follow from another one."""
    findings = list(findings)
    causes = {finding.cause for finding in findings}
    explained = {name for one in TABLE if one.name in causes for name in one.explains}
    return [finding for finding in findings if finding.is_root or finding.cause not in explained]


# -- a configuration -------------------------------------------------------------------------------------


class Settings:
    """A configuration by dotted names. A key that is not there has no finding: a run's record may be damaged."""

    def __init__(self, table: Mapping[str, Any], *, mode: str = "") -> None:
        self._table = table
        self._mode = mode  # what precision.mode = auto came to be, where that is known

    def get(self, key: str) -> Any:
        value: Any = self._table
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def number(self, key: str, default: float = 0.0) -> float:
        value = as_number(self.get(key))
        return default if value is None else value

    def ramp(self, key: str, default: float = 0.0) -> tuple[float, float, float]:
        """(at the start, at the end, where it begins) of a number or a ramp over the run."""
        value = self.get(key)
        if isinstance(value, Mapping):
            start, end, begin = (as_number(value.get(name)) or 0.0 for name in ("start", "end", "begin"))
            return start, end, begin
        constant = as_number(value)
        return (default, default, 0.0) if constant is None else (constant, constant, 0.0)

    @property
    def mode(self) -> str:
        return self._mode or str(self.get("precision.mode") or "auto")

    @cached_property
    def weights(self) -> dict[str, tuple[float, float]]:
        """The weight of each objective at the start and at the end of the run, where one is not 0."""
        sections = section(self._table, "objectives")
        found = {name: self.ramp(f"objectives.{name}.weight")[:2] for name in sections}
        if self.get("objectives.attention.attention_layers") == 0:
            found.pop("attention", None)
        return {name: weight for name, weight in found.items() if any(weight)}

    @property
    def teachers_share(self) -> float:
        """The largest share of terms other than cross-entropy at either end of the run; 0 without a teacher."""
        shares = []
        for end in (0, 1):
            now = {name: weight[end] for name, weight in self.weights.items()}
            taught = sum(weight for name, weight in now.items() if name != "ce")
            shares.append(taught / sum(now.values()) if sum(now.values()) > 0 else 0.0)
        return max(shares)

    @property
    def rows_per_batch(self) -> float:
        return self.number("train.step_rows" if self.get("train.batch_size") == "auto" else "train.batch_size", 0)

    # The schedule as it is configured, with 0 where the data decides. `Case` has that of the run.

    @property
    def planned_steps(self) -> int:
        return int(self.number("train.max_steps"))

    @property
    def accumulation(self) -> int:
        """Micro-batches in a step."""
        return int(self.number("train.gradient_accumulation_steps", 1))

    @property
    def warmup_share(self) -> float:
        """The share of the run's steps that is warm-up; 0 where it cannot be known yet."""
        warmup, steps = self.number("train.warmup_steps"), self.planned_steps
        share = (warmup / steps if steps else 0.0) if warmup else self.number("train.warmup_ratio")
        return min(share, self.number("train.max_warmup_share", 1.0))

    # What a run's record knows and a configuration does not.

    @property
    def span(self) -> tuple[int, ...]:
        """The first and the last step."""
        return ()

    @property
    def num_batches(self) -> float:
        """Micro-batches in an epoch; 0 where the data was not counted."""
        return 0.0

    @property
    def is_trial(self) -> bool:
        """Whether the run is too short to say something about its rate."""
        return False

    @property
    def ended_in_warmup(self) -> bool:
        return False

    @property
    def warmup_seen(self) -> Mapping[str, float]:
        """Rates of the steps that were taken, and of the schedule."""
        return {}


def judge_settings(settings: Settings, *, without: Collection[Judge] = ()) -> list[Finding]:
    """What in a configuration is likely to harm, the gravest first; not what follows from another finding."""
    rules = [rule for rule in rules_for("settings") if rule.judge not in without]
    found = roots(one for rule in rules for one in rule.find(settings))
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def found(
    severity: Severity,
    evidence: str,
    advice: str = "",
    setting: str = "",
    *,
    steps: tuple[int, ...] = (),
    otherwise: str = "",
    cause: str = "",
    numbers: Mapping[str, Any] | None = None,
    **more_numbers: Any,
) -> Finding:
    """A finding; what is given by other names are numbers it rests on."""
    return Finding(severity, evidence, advice, setting, steps, otherwise, {**(numbers or {}), **more_numbers}, cause)


# -- numbers with a bound --------------------------------------------------------------------------------

LOW_RATE = 1e-7  # the spacing of FP32 numbers of size 1


def limit(
    name: str,
    key: str,
    what: str,
    advice: str,
    better: str,
    *,
    above: float = math.inf,
    below: float = -math.inf,
    default: float = 0.0,
    severity: Severity = "warning",
    when: Callable[[Settings], object] = lambda _settings: True,
) -> None:
    """Add the rule of a number, or of both ends of a ramp, that should be neither above nor below its bound."""

    def judge(settings: Settings) -> Finding | None:
        ends = settings.ramp(key, default)[:2]
        value = max(ends) if max(ends) > above else min(ends)
        if below <= value <= above or not when(settings):
            return None
        numbers = {key.rpartition(".")[2]: value}
        return found(severity, f"{key} = {value:g}: {what}", advice, f"{key}={better}", numbers=numbers)

    judge.__name__ = name
    rule("settings")(judge)


# fmt: off
limit("lax_guard", "guard.max_skip_share", above=0.5,
      what="most steps may be refused before the run stops: a broken run will look like a slow one",
      advice="let the guard stop it earlier", better="0.1")
limit("patient_guard", "guard.max_consecutive", above=200,
      what="so many steps in a row may be refused before the run stops: a broken run will look like a slow one",
      advice="let the guard stop it earlier", better="20")
limit("skipped_norms", "guard.skip_grad_norm", above=0.0,
      what="it is compared with the norm before clipping, which small batches exceed in most steps",
      advice="turn it off; guard.spike_z follows the run's norms", better="0")
limit("rate_too_low", "train.learning_rate", below=LOW_RATE, default=1.0, severity="problem",
      what="below the spacing of FP32 weights of size 1, so updates are lost",
      advice="1e-5 to 3e-4 for a pretrained student", better="0.0001")
# Ordinary gradient norms of language models lie above 0.1; the smallest clip of a preset is 0.25.
limit("clipped_to_nothing", "train.max_grad_norm", below=0.1, default=1.0,
      what="every gradient is clipped, so a bad batch weighs as much as a good one",
      advice="1.0 bounds bad batches and leaves ordinary ones alone", better="1.0")
# Temperatures with published gains lie between.
limit("temperature_too_high", "objectives.kd.temperature", above=4.0, default=1.0, when=lambda s: s.teachers_share,
      what="the teacher's answer becomes nearly uniform", advice="1 to 2", better="1")
limit("temperature_too_low", "objectives.kd.temperature", below=0.5, default=1.0, when=lambda s: s.teachers_share,
      what="little is left of the teacher's answer but its top token", advice="1 to 2", better="1")
limit("bad_lines", "data.max_bad_share", above=0.1, severity="hint",
      what="so much of the data may be unreadable before a run stops", advice="1 % is the default", better="0.01")
# fmt: on


# -- clamps ----------------------------------------------------------------------------------------------

EXAMPLE_VOCABULARY = 50_257  # to say what a clamp does; the models' own is known where they are loaded
LEAST_TOP = 0.99  # a clamp should let a probability come at least so near to 1
LOSS_OF_AN_EARLY_BATCH = 10.0  # nats; a clamp below it cuts off the first steps of any student


@rule("settings")
def clamped_logits(settings: Settings) -> Finding | None:
    """Clamped logits have no gradient, and +-c bounds the top probability over V tokens: 1 / (1 + (V - 1) e^-2c)."""
    clamp = settings.number("guard.logit_clamp")
    if clamp <= 0:
        return None
    top = 1.0 / (1.0 + (EXAMPLE_VOCABULARY - 1) * math.exp(-2.0 * clamp))
    return found(
        "problem" if top < LEAST_TOP else "warning",
        f"guard.logit_clamp = {clamp:g}: clamped logits have no gradient, and over {EXAMPLE_VOCABULARY:,} tokens no "
        f"probability can be above {format_percent(top, 2)}, so no perplexity below {1 / top:,.4g}",
        "turn the clamp off; losses are computed in FP32 and need none",
        "guard.logit_clamp=0",
        clamp=clamp,
    )


@rule("settings")
def clamped_loss(settings: Settings) -> Finding | None:
    clamp = settings.number("guard.loss_clamp")
    if clamp <= 0:
        return None
    return found(
        "problem" if clamp <= LOSS_OF_AN_EARLY_BATCH else "warning",
        f"guard.loss_clamp = {clamp:g}: a clamped loss has no gradient, so the hardest batches are not learned",
        "turn the clamp off; the guard skips bad batches",
        "guard.loss_clamp=0",
        clamp=clamp,
    )


# -- the optimizer and its rate --------------------------------------------------------------------------

HIGH_RATE, HIGH_PRETRAINED_RATE = 2e-2, 3e-3  # no student we know of learns above; pretrained ones forget above
TYPICAL_WEIGHT = 0.02  # root mean square of a transformer's matrices
FP16_SPACING = 2.0 ** (math.floor(math.log2(TYPICAL_WEIGHT)) - 10)  # of FP16 numbers of that size
LEAST_MOVED = 0.1  # share of FP16 weights that a stochastically rounded update should move
HIGH_ROUTER_RATIO = 3.0  # of the router's rate to the student's: sets off the alarm more often and gains nothing
HIGH_EPSILON = 1e-4


@rule("settings")
def rate_too_high(settings: Settings) -> Finding | None:
    rate = settings.number("train.learning_rate")
    if rate > HIGH_RATE:
        usual = "1e-3 to 1e-2 for a small student from scratch, 1e-5 to 3e-4 for a pretrained one"
        what = f"train.learning_rate = {format_lr(rate)}: AdamW moves every weight by about this much in a step"
        return found("problem", what, usual, "train.learning_rate=0.001", learning_rate=rate)
    if rate > HIGH_PRETRAINED_RATE and settings.get("student.init") == "pretrained":
        what = f"train.learning_rate = {format_lr(rate)} is a rate for random weights: pretrained ones forget at it"
        return found("warning", what, "1e-5 to 3e-4", "train.learning_rate=0.0003", learning_rate=rate)
    return None


@rule("settings")
def noop_updates(settings: Settings) -> Finding | None:
    rate = settings.number("train.learning_rate", 1.0)
    moved = rate / FP16_SPACING
    if settings.mode != "fp16-sr" or moved >= LEAST_MOVED or rate < LOW_RATE:
        return None
    return found(
        "warning",
        f"at train.learning_rate = {format_lr(rate)} FP16 weights alone move in {format_percent(moved)} of their "
        f"updates, the rest is noise: FP16's spacing at weights of {TYPICAL_WEIGHT} is {FP16_SPACING:.1e}",
        "keep a residual of each weight",
        "precision.mode=fp16-split",
        learning_rate=rate,
    )


@rule("settings")
def router_rate_too_high(settings: Settings) -> Finding | None:
    rate, router = settings.number("train.learning_rate", 1e-3), settings.number("train.router_learning_rate")
    if not rate or router <= HIGH_ROUTER_RATIO * rate:
        return None
    what = f"train.router_learning_rate = {format_lr(router)} is {router / rate:.0f} times the student's"
    return found("warning", what, "take the student's", "train.router_learning_rate=0", router_learning_rate=router)


@rule("settings")
def unbounded_steps(settings: Settings) -> Finding | None:
    """AdamW's step is bounded by the betas where beta1^2 < beta2 (Cauchy-Schwarz inequality)."""
    beta1, beta2 = settings.number("train.beta1"), settings.number("train.beta2", 1.0)
    if beta1 * beta1 < beta2:
        return None
    what = f"with train.beta1 = {beta1:g} and train.beta2 = {beta2:g} nothing bounds the step of AdamW"
    return found("warning", what, "0.9 with 0.95 to 0.999 is usual", "train.beta2=0.999", beta1=beta1, beta2=beta2)


@rule("settings")
def large_epsilon(settings: Settings) -> Finding | None:
    epsilon = settings.number("train.epsilon")
    if epsilon < HIGH_EPSILON:
        return None
    what = f"train.epsilon = {epsilon:g} is larger than most gradients: small ones are not followed"
    return found("warning", what, "take the usual one", "train.epsilon=1e-8", epsilon=epsilon)


# -- the schedule ----------------------------------------------------------------------------------------

USUAL_WARMUP = (0.01, 0.2)  # of the run
LONG_WARMUP, MOSTLY_WARMUP = 0.3, 0.5  # of the run: a warning above, a problem from the second on
SAME_COUNT = 0.01  # of a number of steps
TRIAL_STEPS = 10  # a shorter run says little about its rate


@rule("settings", explains=("never_out_of_warmup",))
def schedule_in_micro_batches(settings: Settings) -> Finding | None:
    """Warm-up or length of the run counted in micro-batches: too long by the accumulation."""
    steps, micro, warmup = settings.planned_steps, settings.accumulation, settings.number("train.warmup_steps")
    if micro < 2 or not steps:
        return None
    share = min(warmup / steps, settings.number("train.max_warmup_share", 1.0))
    if share > LONG_WARMUP and USUAL_WARMUP[0] <= share / micro <= USUAL_WARMUP[1]:
        return found(
            "problem",
            f"train.warmup_steps is {format_count(warmup)} of {format_count(steps)} optimizer steps "
            f"({format_percent(share)}); at {micro} micro-batches a step it would be {format_percent(share / micro)} "
            "of the micro-batches",
            f"count in optimizer steps: divide by train.gradient_accumulation_steps ({micro})",
            f"train.warmup_steps={max(1, round(warmup / micro))}",
            steps=settings.span,
            numbers={"warmup_steps": warmup, "optimizer_steps": steps, "accumulation": micro},
        )
    asked, batches, epochs = (
        settings.number("train.max_steps"),
        settings.num_batches,
        settings.number("train.epochs", 1),
    )
    if asked and batches and abs(asked - batches * epochs) <= SAME_COUNT * asked:
        return found(
            "warning",
            f"train.max_steps is {format_count(asked)}, the number of micro-batches in {epochs:g} epochs; a step has "
            f"{micro}, so the run takes {micro} times as many passes over the data",
            "count in optimizer steps",
            f"train.max_steps={max(1, round(asked / micro))}",
            steps=settings.span,
            numbers={"max_steps": asked, "total_batches": batches, "accumulation": micro},
        )
    return None


@rule("settings")
def never_out_of_warmup(settings: Settings) -> Finding | None:
    """The run spends much of its steps in warm-up, or ended inside it: the peak rate is hardly ever used."""
    share = settings.warmup_share
    if share <= LONG_WARMUP and not settings.ended_in_warmup:
        return None
    what = f"warm-up takes {format_percent(share)} of the run"
    seen = settings.warmup_seen
    if seen:
        median, largest, peak = (format_lr(seen[key]) for key in ("median_lr", "largest_lr", "peak"))
        what += f"; the rate was {median} in the median step and {largest} at most, of a peak of {peak}"
    usual = max(1, settings.planned_steps // 10)
    return found(
        "hint" if settings.is_trial else "problem" if share >= MOSTLY_WARMUP else "warning",
        what,
        "a tenth of the run is usual",
        f"train.warmup_steps={usual}" if settings.number("train.warmup_steps") else "train.warmup_ratio=0.1",
        steps=settings.span,
        otherwise="train for longer: the run ended inside its warm-up",
        numbers=seen,
        share=share,
    )


@rule("settings")
def never_evaluated(settings: Settings) -> Finding | None:
    steps, every = settings.number("train.max_steps"), settings.number("train.eval_steps")
    if not steps or every <= steps:
        return None
    what = f"train.eval_steps = {every:.0f} and train.max_steps = {steps:.0f}: the only evaluation is the last"
    return found("hint", what, "leave it out: up to ten are spread over the run", "train.eval_steps=0")


# -- the objective ---------------------------------------------------------------------------------------

INNER = frozenset({"feature", "attention", "layerwise", "contrastive"})
LOW_TEACHERS_SHARE = 0.1  # of all weights


@rule("settings")
def hardly_distils(settings: Settings) -> Finding | None:
    share = settings.teachers_share
    if not 0 < share < LOW_TEACHERS_SHARE:
        return None
    labels = max(settings.weights.get("ce", (0.5,)))
    return found(
        "warning",
        f"the teacher's terms have {format_percent(share)} of the weights: plain training with hardly any "
        "distillation that pays for the teacher's forward passes",
        "weigh the teacher as much as the labels, or set objectives.kd.weight=0 and save its passes",
        f"objectives.kd.weight={labels:g}",
        share=share,
    )


@rule("settings", is_red=True)
def impossible_estimate(settings: Settings) -> Finding | None:
    divergence, kind = settings.get("objectives.kd.divergence"), settings.get("teacher.signal.kind")
    if not settings.teachers_share or divergence in (None, "forward_kl") or kind not in ("sampled", "hybrid"):
        return None
    what = f"{clean(divergence)} cannot be estimated from {kind} answers"
    advice = "take forward KL, or the teacher's top tokens (teacher.signal.kind=top_k)"
    return found("problem", what, advice, "objectives.kd.divergence=forward_kl")


@rule("settings")
def biased_signal(settings: Settings) -> Finding | None:
    if settings.get("teacher.signal.kind") != "renormalised":
        return None
    what = "teacher.signal.kind = renormalised: the student learns that all other tokens are impossible"
    return found("warning", what, "top_k keeps the exact mass of the rest", "teacher.signal.kind=top_k")


@rule("settings")
def dead_component(settings: Settings) -> Finding | None:
    if "contrastive" not in settings.weights or settings.rows_per_batch != 1:
        return None
    what = "objectives.contrastive compares the rows of a micro-batch, and it has one: the term is always 0"
    key = "train.step_rows" if settings.get("train.batch_size") == "auto" else "train.batch_size"
    return found("warning", what, "give batches several rows", f"{key}=8")


def ramp_text(end: float, begin: float) -> str:
    """A ramp as a value for --set: nothing until `begin`, `end` at twice that."""
    return f"{{start = 0.0, end = {end:g}, begin = {begin:g}, until = {min(1.0, 2 * begin):g}}}"


@rule("settings")
def active_when_zero(settings: Settings) -> Iterator[Finding]:
    """A curriculum begins with the logits alone."""
    phases = settings.get("curriculum.phases")
    if not isinstance(phases, list | tuple) or len(phases) < 2 or not isinstance(phases[0], Mapping):
        return
    until = as_number(phases[0].get("until"))
    for name in sorted(INNER):
        start, end, begin = settings.ramp(f"objectives.{name}.weight")
        if until is not None and (start > 0 or (end > 0 and begin < until)):
            yield found(
                "warning",
                f"objectives.{name} has a weight in the first phase, {clean(phases[0].get('name'))}, where the logits "
                "should be alone",
                "let it begin where the phase ends",
                f"objectives.{name}.weight={ramp_text(end, until)}",
                weight=start,
            )


# -- teacher, student and data ---------------------------------------------------------------------------


@rule("settings")
def same_model(settings: Settings) -> Finding | None:
    model = settings.get("teacher.model")
    is_loaded = settings.get("student.init") in ("auto", "pretrained")
    if not settings.teachers_share or not is_loaded or model is None or model != settings.get("student.model"):
        return None
    if settings.get("data.teacher_prefix"):
        return None
    what = f"teacher and student are the same model, {clean(model)}: there is nothing to distil"
    return found("warning", what, f"--student with a smaller model, or cut one: {_CUT}")


@rule("settings")
def teaches_itself(settings: Settings) -> Finding | None:
    """The student's own network has nothing to say about text that both read, until labels have moved the student."""
    model = settings.get("teacher.model")
    if model not in ("self", "ema") or not settings.teachers_share or settings.get("data.teacher_prefix"):
        return None
    if settings.teachers_share < 1.0:
        return None
    what = f"teacher.model = {model} reads what the student reads: at the first step there is nothing to learn from it"
    return found("warning", what, f"{_CONTEXT}, or let labels move the student", "objectives.ce.weight=0.5")


_CONTEXT = "give the teacher a context: data.teacher_prefix, or teacher_messages or teacher_prompt in the records"

_CUT = "--set student.init=shrink --set student.shrink.to=0.5"  # without a size nothing is cut: the student is a copy


@rule("settings")
def gates_follow_the_student(settings: Settings) -> Finding | None:
    mode = settings.get("teacher.router.mode")
    pulls = [settings.number(f"teacher.router.{name}_weight") for name in ("truth", "anchor")]
    if mode not in ("sar", "sar-joint") or any(pulls):
        return None
    what = f"teacher.router.mode = {mode} with nothing but the student to follow turns the teacher into it"
    return found("warning", what, "hold the gates to the labels", "teacher.router.truth_weight=1")


@rule("settings", is_red=True)
def leaking_data(settings: Settings) -> Finding | None:
    train, held_out = settings.get("data.train"), settings.get("data.eval")
    sources = train if isinstance(train, list | tuple) else [{"path": train}]
    if held_out is None or held_out not in [one.get("path") for one in sources if isinstance(one, Mapping)]:
        return None
    what = f"data.eval is the training data, {clean(held_out)}: every result would be that of memorised text"
    return found("problem", what, "leave data.eval out: a share is held out by content", "data.eval=none")


# -- before the first step -----------------------------------------------------------------------------

KNOWS_NOTHING = 0.5  # of the vocabulary's size, which is the perplexity of a guess
LEAST_TRAVEL = 1.0  # in standard deviations of the weights
SCRATCH_RATE = 1e-3  # the least that a small student from scratch needs
SAME_KL = 1e-5  # nats; the same weights in half precision are below it


@dataclass(frozen=True)
class Start:
    """What was measured on the student before its first step. What costs a pass over the weights is a function."""

    perplexity: float
    vocab_size: int
    kl: float | None  # to the teacher; None without one
    agreement: float | None
    num_steps: int
    learning_rate: float
    travel: Callable[[], float]  # the rates of all steps together: AdamW moves a weight by at most about this much
    spread: Callable[[], float]  # root mean square of the student's matrices
    is_own_teacher: bool = False  # the student's network is the teacher's
    learns_labels: bool = True
    is_dry_run: bool = False  # its few steps show that the run works, not what it learns


@rule("start")
def stands_still(start: Start) -> Finding | None:
    """An untrained student cannot move its weights by about their own size."""
    if start.is_dry_run or start.perplexity < KNOWS_NOTHING * start.vocab_size:
        return None
    travel, spread = start.travel(), start.spread()
    if travel >= LEAST_TRAVEL * spread:
        return None
    steps = f"{start.num_steps:,} steps at learning rate {format_lr(start.learning_rate)}"
    higher = ", at a rate of 1e-3 to 1e-2 as small students from scratch need (--set train.learning_rate=...)"
    rate = higher if start.learning_rate < SCRATCH_RATE else ""
    return found(
        "warning",
        f"the student knows nothing yet, and {steps} move a weight by at most about {travel:.2g}; a typical weight is "
        f"{spread:.2g}: it will hardly learn",
        f"train for more steps{rate}, or begin with pretrained weights",
    )


@rule("start")
def student_is_teacher(start: Start) -> Finding | None:
    """The student answers as its teacher does before it has learned anything."""
    if start.kl is None or start.agreement is None or start.kl > SAME_KL or start.agreement < 1.0:
        return None
    if start.is_own_teacher and start.learns_labels:
        return None
    if start.is_own_teacher:
        return found(
            "warning",
            "the student teaches itself and its answers before training are the same: there is nothing to learn yet",
            f"{_CONTEXT}, or let labels move the student: --set objectives.ce.weight=0.5",
        )
    return found(
        "warning",
        "teacher and student give the same answers before any training: they seem to have the same weights, and there "
        "is nothing to learn",
        f"name another teacher, a smaller student, or cut one: {_CUT}",
    )


def doubts(start: Start, settings: Settings) -> list[str]:
    """Reasons why this run is unlikely to work, as lines for its log."""
    findings = [one for rule in rules_for("start") for one in rule.find(start)]
    findings += [one for one in [hardly_distils(settings)] if isinstance(one, Finding)]
    return [f"{one.evidence}: {one.remedy}" for one in findings]
