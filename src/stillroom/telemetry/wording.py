"""Format numbers, names and events as plain text for terminal, log and report.

No colours and no layout. All text goes through `clean` before it is shown, at the latest where it is printed: a model's
name must not be able to move the cursor, hide a line or reverse text, and no key that we know may be read.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stillroom.core.errors import masked

Fields = Mapping[str, Any]
Format = Callable[[float], str]


# CSI, OSC and the other string sequences, then two-byte escapes; 0x80-0x9f are their one-byte forms.
_ESCAPE_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)
_SPACES = {"\t": "    ", "\n": "\n", "\u2028": "\n", "\u2029": "\n"}
# Invisible, but needed to write Persian and Indian scripts.
_JOINERS = frozenset("\u200c\u200d")
_UNSEEN = frozenset({"Cc", "Cf"})


def clean(text: object, *, keep_lines: bool = False) -> str:
    """`text` without control characters, escape sequences, direction overrides and known keys.

    Without `keep_lines` the result is one line. A lone surrogate becomes "?": a JSON file can hold it, a terminal
    cannot show it.
    """
    plain = _ESCAPE_SEQUENCE.sub("", str(text).replace("\r\n", "\n").replace("\r", "\n"))
    if not plain.isprintable():
        plain = "".join(_visible(character) for character in plain)
    return masked(plain if keep_lines else plain.replace("\n", " "))


def _visible(character: str) -> str:
    if character in _SPACES:
        return _SPACES[character]
    if character in _JOINERS:
        return character
    category = unicodedata.category(character)
    if category == "Cs":
        return "?"
    return "" if category in _UNSEEN else character


def clip(text: object, width: int) -> str:
    """One clean line of at most `width` characters, ending in dots if it was cut."""
    line = clean(text)
    return line if len(line) <= width else line[: max(width - 3, 0)].rstrip() + "..."


# -- numbers ---------------------------------------------------------------------------------------------


def as_number(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        return None
    return number if math.isfinite(number) else None


def format_lr(value: float) -> str:
    """Three significant digits. A positive rate is never shown as zero."""
    return f"{value:.2e}"


def format_loss(value: float) -> str:
    """Usually three decimals: 2.314, 0.412, 95.873, 1,204.5, 0.00812, 3.10e-05."""
    if abs(value) < 1e6:
        return f"{value:,.1f}" if abs(value) >= 1000 else _small(value, 3)
    return f"{value:.2e}"


def format_norm(value: float) -> str:
    """Two decimals, or three significant digits of small and large norms: 0.83, 0.0123, 2.50e+04."""
    return _small(value, 2) if abs(value) < 1000 else f"{value:.2e}"


def _small(value: float, decimals: int) -> str:
    if value == 0 or abs(value) >= 0.1:
        return f"{value:.{decimals}f}"
    return f"{value:#.3g}" if abs(value) >= 1e-3 else f"{value:.2e}"


def format_result(value: float) -> str:
    """Three significant digits; whole numbers from a hundred on: 1.62, 57.1, 134, 2,031."""
    size = abs(value)
    if math.isnan(value):
        return "nan"
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e7:
        return f"{value:.2e}"
    # Round first: 99.96 must not show as 100.0.
    digits = math.floor(math.log10(float(f"{size:.2e}")))
    return f"{value:,.{max(0, 2 - digits)}f}"


def format_count(value: float) -> str:
    return f"{value:,.0f}"


def format_percent(share: float, decimals: int = 1) -> str:
    return f"{100 * share:.{decimals}f}%"


def format_duration(seconds: float) -> str:
    """Two units at most: 0.4s, 12s, 2m10s, 3h05m, 2d04h."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}s"
    whole = round(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    return f"{minutes}m{second:02d}s" if minutes else f"{second}s"


def format_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


# -- values of a record --------------------------------------------------------------------------------


def section(record: Fields, key: str) -> Fields:
    """A mapping inside a record; empty if there is none."""
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def items(record: Fields, key: str) -> Sequence[Any]:
    """A list inside a record; empty if there is none."""
    value = record.get(key)
    return value if isinstance(value, list | tuple) else ()


def reading(record: Fields, key: str) -> float | None:
    """A number of a record; NaN and infinity are restored from the sibling key."""
    word = record.get(f"{key}_nonfinite")
    if word in ("nan", "inf", "-inf"):
        return float(str(word))
    return as_number(record.get(key))


def show(record: Fields, key: str, form: Format) -> str:
    """A number of a record as text: formatted, or `nan`, `inf`, or `-` if there is none."""
    value = reading(record, key)
    return "-" if value is None else form(value)


def show_interval(record: Fields, key: str, form: Format) -> str:
    """The 95 % interval of a metric, `55.0 to 59.3`; empty if there is none or both ends print the same."""
    bounds = [as_number(bound) for bound in items(section(record, "intervals"), key)]
    if len(bounds) != 2 or bounds[0] is None or bounds[1] is None:
        return ""
    low, high = form(bounds[0]), form(bounds[1])
    return f"{low} to {high}" if low != high else ""


# -- events as lines: lower case, units, ASCII, one thing a line ---------------------------------------

NUM_SAMPLES_NAMED = 3
SAMPLE_WIDTH = 66
_MOSTLY = 0.9  # below this share of scored tokens, print their number


def _short(value: float) -> str:
    return f"{value:.4g}"


def start_lines(event: Fields, *, verbose: bool = True) -> list[str]:
    """What is trained, on what, and how. Notes that are details are left out unless `verbose`."""
    lines = [f"run {clean(event['run'])}"] if event.get("run") else []
    lines += _schedule_lines(section(event, "schedule"))
    precision = section(event, "precision")
    if precision:
        lines.append(f"precision {clean(precision.get('mode'))}: {clean(precision.get('reason'))}")
    lines += [_model_line(name, section(event, name)) for name in ("teacher", "student") if section(event, name)]
    data = section(event, "data")
    if data:
        lines += [_data_line("train", data), _data_line("eval", data)]
        hidden = () if verbose else items(data, "details")
        lines += [note_line({"text": note}) for note in items(data, "notes") if note not in hidden]
    return lines


def _schedule_lines(schedule: Fields) -> list[str]:
    if not schedule:
        return []
    steps, warmup = as_number(schedule.get("optimizer_steps")), as_number(schedule.get("warmup_steps"))
    share = f" ({format_percent(warmup / steps)})" if steps and warmup is not None else ""
    counts = [
        ("total batches" if _is_one_epoch(schedule) else "batches of an epoch", "total_batches"),
        ("gradient accumulation", "gradient_accumulation"),
        ("optimizer steps", "optimizer_steps"),
        ("warmup steps", "warmup_steps"),
    ]
    lines = [" | ".join(f"{label} {show(schedule, key, format_count)}" for label, key in counts) + share]
    lines += _partial_lines(schedule)
    if "learning_rate" in schedule:
        lines.append(f"learning rate {show(schedule, 'learning_rate', format_lr)} at its peak")
    return lines


def _windows(schedule: Fields) -> tuple[int, int, int]:
    """The whole windows of an epoch, the batches left over, and the batches of a window."""
    batches = int(as_number(schedule.get("total_batches")) or 0)
    size = int(as_number(schedule.get("gradient_accumulation")) or 1) * int(as_number(schedule.get("processes")) or 1)
    return *divmod(batches, size), size


def _is_one_epoch(schedule: Fields) -> bool:
    whole, rest, _size = _windows(schedule)
    return as_number(schedule.get("optimizer_steps")) == whole + (rest > 0)


def _partial_lines(schedule: Fields) -> list[str]:
    """The last window of an epoch, where the batches do not fill it: 74,823 are 4,676 windows of 16 and one of 7."""
    whole, rest, size = _windows(schedule)
    if not rest or not whole:
        return []
    return [f"optimizer steps of an epoch: {format_count(whole)} of {size} batches, and a last one of {rest}"]


def _model_line(role: str, model: Fields) -> str:
    parts = [f"{role} {clean(model.get('name'))}", f"{show(model, 'parameters', format_count)} parameters"]
    parts += [f"{key} {show(model, key, format_count)}" for key in ("layers", "width", "vocabulary") if key in model]
    return "  ".join(parts)


def _data_line(split: str, data: Fields) -> str:
    label = "training data" if split == "train" else "held-out data"
    tokens, documents = show(data, f"{split}_tokens", format_count), show(data, f"{split}_documents", format_count)
    targets, whole = (as_number(data.get(f"{split}_{unit}")) for unit in ("targets", "tokens"))
    is_partly = targets is not None and whole is not None and targets < _MOSTLY * whole
    scored = f", {show(data, f'{split}_targets', format_count)} of them scored" if is_partly else ""
    return f"{label}  {tokens} tokens in {documents} documents{scored}"


def first_forward_lines(event: Fields) -> list[str]:
    """Shapes and weights of the first batch, so that a wrong pair of models shows early."""
    weights = section(event, "weights")
    weighed = "  ".join(f"{clean(name)} {show(weights, name, _short)}" for name in weights) or "-"
    return [
        "first forward",
        f"  rows {show(event, 'rows', format_count)}  positions {show(event, 'positions', format_count)}"
        f"  scored {show(event, 'scored', format_count)}",
        f"  student hidden {_shape(event, 'student_hidden')}  teacher hidden {_shape(event, 'teacher_hidden')}"
        f"  vocabulary {show(event, 'vocabulary', format_count)}",
        *_pairing_lines(event),
        f"  temperature {show(event, 'temperature', _short)}  weights {weighed}",
    ]


def _pairing_lines(event: Fields) -> list[str]:
    """Whether the two models have the same vocabulary and the same alignment of targets."""
    lines = []
    if items(event, "student_logits"):
        lines.append(f"  student logits {_shape(event, 'student_logits')}  teacher {_shape(event, 'teacher_logits')}")
    hashes = section(event, "vocabulary_hash")
    if hashes:
        named = "  ".join(f"{clean(name)} {clean(value)}" for name, value in hashes.items())
        same = "" if len(hashes) < 2 else "  the same" if len(set(hashes.values())) == 1 else "  different"
        lines.append(f"  vocabulary hash  {named}{same}")
    alignment = section(event, "alignment")
    if alignment:
        losses = (("as given", "as_given"), ("one back", "one_back"), ("one ahead", "one_ahead"))
        shown = "  ".join(f"{label} {show(alignment, key, format_loss)}" for label, key in losses)
        lines.append(f"  {clean(alignment.get('model'))} loss by targets  {shown}")
    return lines


def quantised_line(event: Fields) -> str:
    """What quantising the teacher changed, and what it saved."""
    sizes = [show(event, key, format_bytes) for key in ("full_bytes", "bytes")]
    return (
        f"teacher quantised to {clean(event.get('kind'))}: kl to the full teacher {show(event, 'kl', _short)}, at most "
        f"{show(event, 'max_kl', _short)}, over {show(event, 'positions', format_count)} positions; "
        f"{show(event, 'layers', format_count)} linear layers, {sizes[0]} to {sizes[1]}; its head is not quantised"
    )


def _shape(event: Fields, key: str) -> str:
    sizes = items(event, key)
    return f"[{', '.join(clean(size) for size in sizes)}]" if sizes else "-"


def step_counters(event: Fields, skipped: int) -> list[str]:
    """Loss, terms and counters of a step. Terms are raw means; a weight that is not 1 follows: `ce 3.804 (x0.5)`."""
    counters = [f"loss {show(event, 'train_loss', format_loss)}"]
    for name, term in _active_terms(event):
        weight = "" if term.get("weight") == 1 else f" (x{show(term, 'weight', _short)})"
        counters.append(f"{clean(name)} {show(term, 'raw', format_loss)}{weight}")
    counters.append(f"lr {show(event, 'lr', format_lr)}")
    counters.append(f"grad {show(event, 'grad_norm', format_norm)}")
    counters.append(f"skipped {skipped}")
    return counters


def step_place(event: Fields, num_steps: int) -> str:
    """`step 120/600`, or the step alone where the number of steps is not known."""
    done = format_count(as_number(event.get("step")) or 0.0)
    return f"step {done}/{format_count(num_steps)}" if num_steps else f"step {done}"


def stage_line(event: Fields) -> str:
    """What is done, how far it is, and about how long it takes: `evaluating the student: 3 of 40 batches, 12s left`."""
    parts = []
    total, done = as_number(event.get("total")), as_number(event.get("done"))
    if total:
        of = f"{format_count(done)} of " if done is not None else ""
        parts.append(f"{of}{format_count(total)} {clean(event.get('unit'))}")
    if (as_number(event.get("eta_seconds")) or 0.0) >= 1:
        left = " left" if done is not None else ""
        parts.append(f"about {show(event, 'eta_seconds', format_duration)}{left}")
    name = clean(event.get("name"))
    return f"{name}: {', '.join(parts)}" if parts else f"{name} ..."


def pace_counters(event: Fields) -> list[str]:
    counters = [f"{show(event, 'tokens_per_second', format_count)} tok/s"]
    if as_number(event.get("eta_seconds")) is not None:
        counters.append(f"eta {show(event, 'eta_seconds', format_duration)}")
    return counters


def step_line(event: Fields, skipped: int) -> str:
    return "  ".join([f"step {event.get('step')}", *step_counters(event, skipped), *pace_counters(event)])


_IDLE: Fields = {"weight": 0.0, "scaled": 0.0, "share": 0.0}


def component_lines(event: Fields, temperature: float | None, num_steps: int = 0) -> list[str]:
    """Every term of a step: raw mean, weight, product, share; their sum; the temperature and its square.

    A term of weight 0 is not computed, so it has no raw value, and adds nothing.
    """
    terms = [(name, term) for name, term in section(event, "terms").items() if isinstance(term, Mapping)]
    if not terms:
        return []
    terms += [(clean(name), _IDLE) for name in items(event, "idle_terms")]
    width = max(4, *(len(clean(name)) for name, _ in terms))
    lines = [f"  {'term':<{width}}  {'raw':>10}  {'weight':>8}  {'scaled':>10}  {'share':>6}"]
    for name, term in terms:
        raw, weight = show(term, "raw", format_loss), show(term, "weight", _short)
        scaled, share = show(term, "scaled", format_loss), show(term, "share", format_percent)
        lines.append(f"  {clean(name):<{width}}  {raw:>10}  {weight:>8}  {scaled:>10}  {share:>6}")
    lines.append(f"  {'sum':<{width}}  {'':>10}  {'':>8}  {show(event, 'train_loss', format_loss):>10}")
    if event.get("phase") and items(event, "idle_terms"):
        done = as_number(event.get("step"))
        progress = f", {format_percent(done / num_steps)} of the run" if num_steps and done is not None else ""
        lines.append(f"  phase {clean(event['phase'])}{progress}: a term of weight 0 is not computed")
    if temperature is not None:
        lines.append(f"  temperature {_short(temperature)}  squared {_short(temperature**2)}, part of raw kd")
    return [*lines, *_source_lines(event)]


def _source_lines(event: Fields) -> list[str]:
    """The targets and mean terms of each source of a step, where there are several."""
    lines = []
    for name, terms in section(event, "sources").items():
        if isinstance(terms, Mapping):
            means = (f"{clean(term)} {show(terms, term, format_loss)}" for term in terms if term != "targets")
            lines.append(f"  {clean(name)}  {show(terms, 'targets', format_count)} targets  {'  '.join(means)}")
    return lines


def _active_terms(event: Fields) -> list[tuple[str, Fields]]:
    terms = section(event, "terms").items()
    return [(name, term) for name, term in terms if isinstance(term, Mapping) and term.get("weight") != 0]


def note_line(event: Fields) -> str:
    return f"note  {clean(event.get('text'))}"


def advice_line(event: Fields) -> str:
    """A finding of the run's own diagnosis: the cause, its evidence, and what to set."""
    cause = clean(event.get("cause")).replace("_", " ")
    return f"advice  {cause}: {clean(event.get('evidence'))}. {clean(event.get('advice'))}"


def eval_line(event: Fields) -> str:
    parts = [f"eval at step {event.get('step')}", f"perplexity {show(event, 'perplexity', format_result)}"]
    parts.append(f"bits/byte {show(event, 'bits_per_byte', format_result)}")
    optional = (("kl", "kl", format_result), ("agreement", "agreement", format_percent))
    parts += [f"{label} {show(event, key, form)}" for key, label, form in optional if reading(event, key) is not None]
    parts.append(f"objective {show(event, 'objective', format_loss)}")
    answers = section(event, "answers")
    written = (("exact_match", "exact", format_percent), ("own_kl", "own kl", format_result))
    parts += [
        f"{label} {show(answers, key, form)}" for key, label, form in written if reading(answers, key) is not None
    ]
    if event.get("best"):
        parts.append("best")
    unscored = as_number(event.get("unscored_tokens"))
    if unscored:
        parts.append(f"unscored {format_count(unscored)} tokens")
    return "  ".join(parts)


EVAL_HEADS = ("step", "perplexity", "bits/byte", "KL", "agreement", "best")


def eval_cells(event: Fields) -> tuple[str, ...]:
    """The scores of an evaluation under `EVAL_HEADS`."""
    forms = (("perplexity", format_result), ("bits_per_byte", format_result), ("kl", format_result))
    return (
        clean(event.get("step")),
        *(show(event, key, form) for key, form in forms),
        show(event, "agreement", format_percent),
        "best" if event.get("best") else "",
    )


def gradients_line(event: Fields) -> str:
    """Each term's share of the gradient, and the cosines between terms."""
    terms, cosines = section(event, "terms"), section(event, "cosines")
    parts = [f"gradients at step {event.get('step')}"]
    parts += [f"{clean(name)} {show(section(terms, name), 'share', format_percent)}" for name in terms]
    parts += [f"cosine {clean(pair)} {show(cosines, pair, _short)}" for pair in cosines]
    return "  ".join(parts)


def largest_drift(event: Fields) -> float:
    layers = [layer for layer in items(event, "layers") if isinstance(layer, Mapping)]
    return max((as_number(layer.get("drift")) or 0.0 for layer in layers), default=0.0)


def router_line(event: Fields) -> str:
    """The teacher's held-out loss against the start, and the drift of its gates."""
    parts = [f"router at step {event.get('step')}  {clean(event.get('mode'))}"]
    parts.append(f"teacher loss {show(event, 'teacher_nll', format_loss)}")
    parts.append(f"start {show(event, 'teacher_nll_start', format_loss)}")
    parts.append(f"kl to original {show(event, 'kl_to_original', format_loss)}")
    parts.append(f"drift {largest_drift(event):.3g}")
    parts.append(f"updates {show(event, 'updates', format_count)}")
    parts.append(f"skipped {show(event, 'skipped', format_count)}")
    if event.get("alarm"):
        parts.append("alarm: restored and frozen")
    elif event.get("is_frozen"):
        parts.append("frozen")
    return "  ".join(parts)


def phase_line(event: Fields) -> str:
    return f"phase  {clean(event.get('from')) or 'start'} -> {clean(event.get('to'))} at step {event.get('step')}"


def rollouts_line(event: Fields) -> str:
    """A round, and how its answers ended."""
    ended = ", ".join(f"{name} {count}" for name, count in section(event, "ended").items() if as_number(count))
    taken = "  taken as sealed" if event.get("reused") is True else f" in {show(event, 'seconds', format_duration)}"
    length, entropy = show(event, "mean_length", "{:.0f}".format), show(event, "entropy", "{:.2f}".format)
    return (
        f"round {event.get('round')} at step {event.get('step')}  {show(event, 'rows', format_count)} answers{taken}  "
        f"length {length}  entropy {entropy}  ended: {clean(ended)}"
    )


def checkpoint_line(event: Fields) -> str:
    size, seconds = show(event, "bytes", format_bytes), show(event, "seconds", format_duration)
    return f"saved step {event.get('step')}  {size} in {seconds}  {clean(event.get('path'))}"


def guard_line(event: Fields) -> str:
    names = [clip(name, 40) for name in items(event, "sample_ids")]
    more = f" and {len(names) - NUM_SAMPLES_NAMED} more" if len(names) > NUM_SAMPLES_NAMED else ""
    samples = f"  samples {', '.join(names[:NUM_SAMPLES_NAMED])}{more}" if names else ""
    return f"guard at step {event.get('step')}  {clean(event.get('action'))}: {clean(event.get('reason'))}{samples}"


def sample_lines(event: Fields) -> list[str]:
    lines = [f"sample       {clip(event.get('prompt'), SAMPLE_WIDTH)}"]
    voices = ("teacher", "student", "reference")
    return lines + [f"  {voice:<9}  {clip(event[voice], SAMPLE_WIDTH)}" for voice in voices if event.get(voice)]


def resume_line(event: Fields) -> str:
    return f"resuming at step {event.get('step')}"


def changed_inputs_lines(event: Fields) -> list[str]:
    return [
        f"from step {clean(event.get('step'))} on with changed inputs: {clean(text)}"
        for text in items(event, "changes")
    ]


def end_line(event: Fields) -> str:
    parts = [clean(event.get("status") or "ended")]
    if as_number(event.get("steps")) is not None:
        steps, seconds = show(event, "steps", format_count), show(event, "seconds", format_duration)
        in_all = f", {show(event, 'total_seconds', format_duration)} in all" if event.get("total_seconds") else ""
        parts.append(f"{steps} steps in {seconds}{in_all}")
    if event.get("exit_code"):
        parts.append(f"exit code {clean(event['exit_code'])}")
    if event.get("reason"):
        parts.append(clean(event["reason"]))
    return "  ".join(parts)
