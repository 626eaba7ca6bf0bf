"""What is said about each event: an event in, lines of plain text out.

Calm voice: lower case, units, ASCII, one thing a line. Nothing here knows about terminals. Events are read
with care for what may be missing, because a view of a run must not be what ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stillroom.telemetry.wording import (
    as_number,
    clean,
    clip,
    format_bytes,
    format_count,
    format_duration,
    format_loss,
    format_lr,
    format_norm,
    format_percent,
    format_result,
    reading,
)

Fields = Mapping[str, Any]
Format = Callable[[float], str]

NUM_SAMPLES_NAMED = 3
SAMPLE_WIDTH = 66

# The rows of the last table, as they are called in summary.json and on the screen.
RESULT_ROWS = (
    ("teacher", "teacher"),
    ("student_before", "student before"),
    ("student", "student"),
    ("baseline", "plain, equal tokens"),
    ("baseline_equal_compute", "plain, equal compute"),
)
RESULT_COLUMNS: tuple[tuple[str, str, Format], ...] = (
    ("perplexity", "perplexity", format_result),
    ("bits_per_byte", "bits/byte", format_result),
    ("kl", "KL", format_result),
    ("agreement", "agreement", format_percent),
    ("parameters", "parameters", format_count),
)


def show(record: Fields, key: str, form: Format) -> str:
    """A number of a record in the given form, `nan` or `inf` where it is that, `-` where there is none."""
    value = reading(record, key)
    return "-" if value is None else form(value)


def show_interval(record: Fields, key: str, form: Format) -> str:
    """The 95 % interval of a yardstick, `55.0 to 59.3`; nothing where none was taken or both ends read alike."""
    bounds = [as_number(bound) for bound in items(section(record, "intervals"), key)]
    if len(bounds) != 2 or bounds[0] is None or bounds[1] is None:
        return ""
    low, high = form(bounds[0]), form(bounds[1])
    return f"{low} to {high}" if low != high else ""


def section(record: Fields, key: str) -> Fields:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def items(record: Fields, key: str) -> Sequence[Any]:
    value = record.get(key)
    return value if isinstance(value, list | tuple) else ()


def _short(value: float) -> str:
    return f"{value:.4g}"


# -- the start -------------------------------------------------------------------------------------------


def start_lines(event: Fields) -> list[str]:
    lines = [f"run {clean(event['run'])}"] if event.get("run") else []
    lines += _schedule_lines(section(event, "schedule"))
    precision = section(event, "precision")
    if precision:
        lines.append(f"precision {clean(precision.get('mode'))}: {clean(precision.get('reason'))}")
    lines += [_model_line(name, section(event, name)) for name in ("teacher", "student") if section(event, name)]
    data = section(event, "data")
    if data:
        lines += [_data_line("train", data), _data_line("eval", data)]
        lines += [note_line({"text": note}) for note in items(data, "notes")]
    return lines


def _schedule_lines(schedule: Fields) -> list[str]:
    if not schedule:
        return []
    steps, warmup = as_number(schedule.get("optimizer_steps")), as_number(schedule.get("warmup_steps"))
    share = f" ({format_percent(warmup / steps)})" if steps and warmup is not None else ""
    counts = [
        ("total batches", "total_batches"),
        ("gradient accumulation", "gradient_accumulation"),
        ("optimizer steps", "optimizer_steps"),
        ("warmup steps", "warmup_steps"),
    ]
    lines = [" | ".join(f"{label} {show(schedule, key, format_count)}" for label, key in counts) + share]
    if "learning_rate" in schedule:
        lines.append(f"learning rate {show(schedule, 'learning_rate', format_lr)} at its peak")
    return lines


def _model_line(role: str, model: Fields) -> str:
    parts = [f"{role} {clean(model.get('name'))}", f"{show(model, 'parameters', format_count)} parameters"]
    parts += [f"{key} {show(model, key, format_count)}" for key in ("layers", "width", "vocabulary") if key in model]
    return "  ".join(parts)


def _data_line(split: str, data: Fields) -> str:
    label = "training data" if split == "train" else "held-out data"
    tokens, documents = show(data, f"{split}_tokens", format_count), show(data, f"{split}_documents", format_count)
    return f"{label}  {tokens} tokens in {documents} documents"


def first_forward_lines(event: Fields) -> list[str]:
    """Shapes and weights of the first batch, so that a wrong pairing shows before hours are spent on it."""
    weights = section(event, "weights")
    told = "  ".join(f"{clean(name)} {show(weights, name, _short)}" for name in weights) or "-"
    return [
        "first forward",
        f"  rows {show(event, 'rows', format_count)}  positions {show(event, 'positions', format_count)}"
        f"  scored {show(event, 'scored', format_count)}",
        f"  student hidden {_shape(event, 'student_hidden')}  teacher hidden {_shape(event, 'teacher_hidden')}"
        f"  vocabulary {show(event, 'vocabulary', format_count)}",
        *_pairing_lines(event),
        f"  temperature {show(event, 'temperature', _short)}  weights {told}",
    ]


def _pairing_lines(event: Fields) -> list[str]:
    """Whether the two models speak of the same tokens at the same places."""
    lines = []
    if items(event, "student_logits"):
        lines.append(f"  student logits {_shape(event, 'student_logits')}  teacher {_shape(event, 'teacher_logits')}")
    hashes = section(event, "vocabulary_hash")
    if hashes:
        told = "  ".join(f"{clean(name)} {clean(value)}" for name, value in hashes.items())
        same = "" if len(hashes) < 2 else "  the same" if len(set(hashes.values())) == 1 else "  different"
        lines.append(f"  vocabulary hash  {told}{same}")
    alignment = section(event, "alignment")
    if alignment:
        losses = (("as given", "as_given"), ("one back", "one_back"), ("one ahead", "one_ahead"))
        told = "  ".join(f"{label} {show(alignment, key, format_loss)}" for label, key in losses)
        lines.append(f"  {clean(alignment.get('model'))} loss by targets  {told}")
    return lines


def _shape(event: Fields, key: str) -> str:
    sizes = items(event, key)
    return f"[{', '.join(clean(size) for size in sizes)}]" if sizes else "-"


# -- steps -----------------------------------------------------------------------------------------------


def step_counters(event: Fields, skipped: int) -> list[str]:
    """What the step is made of. Terms are shown as they enter the loss, so that they add up to it."""
    counters = [f"loss {show(event, 'train_loss', format_loss)}"]
    counters += [f"{clean(name)} {show(term, 'scaled', format_loss)}" for name, term in _active_terms(event)]
    counters.append(f"lr {show(event, 'lr', format_lr)}")
    counters.append(f"grad {show(event, 'grad_norm', format_norm)}")
    counters.append(f"skipped {skipped}")
    return counters


def pace_counters(event: Fields) -> list[str]:
    counters = [f"{show(event, 'tokens_per_second', format_count)} tok/s"]
    if as_number(event.get("eta_seconds")) is not None:
        counters.append(f"eta {show(event, 'eta_seconds', format_duration)}")
    return counters


def step_line(event: Fields, skipped: int) -> str:
    return "  ".join([f"step {event.get('step')}", *step_counters(event, skipped), *pace_counters(event)])


def component_lines(event: Fields, temperature: float | None) -> list[str]:
    """Every term of a step: raw mean, weight, product, share; their sum; the temperature and its square."""
    terms = [(name, term) for name, term in section(event, "terms").items() if isinstance(term, Mapping)]
    if not terms:
        return []
    width = max(4, *(len(clean(name)) for name, _ in terms))
    lines = [f"  {'term':<{width}}  {'raw':>10}  {'weight':>8}  {'scaled':>10}  {'share':>6}"]
    for name, term in terms:
        raw, weight = show(term, "raw", format_loss), show(term, "weight", _short)
        scaled, share = show(term, "scaled", format_loss), show(term, "share", format_percent)
        lines.append(f"  {clean(name):<{width}}  {raw:>10}  {weight:>8}  {scaled:>10}  {share:>6}")
    lines.append(f"  {'sum':<{width}}  {'':>10}  {'':>8}  {show(event, 'train_loss', format_loss):>10}")
    if temperature is not None:
        lines.append(f"  temperature {_short(temperature)}  squared {_short(temperature**2)}, part of raw kd")
    return lines


def _active_terms(event: Fields) -> list[tuple[str, Fields]]:
    terms = section(event, "terms").items()
    return [(name, term) for name, term in terms if isinstance(term, Mapping) and term.get("weight") != 0]


# -- what happens between steps --------------------------------------------------------------------------


def note_line(event: Fields) -> str:
    return f"note  {clean(event.get('text'))}"


def eval_line(event: Fields) -> str:
    parts = [f"eval at step {event.get('step')}", f"perplexity {show(event, 'perplexity', format_result)}"]
    parts.append(f"bits/byte {show(event, 'bits_per_byte', format_result)}")
    optional = (("kl", "kl", format_result), ("agreement", "agreement", format_percent))
    parts += [f"{label} {show(event, key, form)}" for key, label, form in optional if reading(event, key) is not None]
    parts.append(f"objective {show(event, 'objective', format_loss)}")
    if event.get("best"):
        parts.append("best")
    unscored = as_number(event.get("unscored_tokens"))
    if unscored:
        parts.append(f"unscored {format_count(unscored)} tokens")
    return "  ".join(parts)


def gradients_line(event: Fields) -> str:
    """How much each term pulls, and whether the terms pull the same way."""
    terms, cosines = section(event, "terms"), section(event, "cosines")
    parts = [f"gradients at step {event.get('step')}"]
    parts += [f"{clean(name)} {show(section(terms, name), 'share', format_percent)}" for name in terms]
    parts += [f"cosine {clean(pair)} {show(cosines, pair, _short)}" for pair in cosines]
    return "  ".join(parts)


def phase_line(event: Fields) -> str:
    return f"phase  {clean(event.get('from')) or 'start'} -> {clean(event.get('to'))} at step {event.get('step')}"


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


def end_line(event: Fields) -> str:
    parts = [clean(event.get("status") or "ended")]
    if as_number(event.get("steps")) is not None:
        steps, seconds = show(event, "steps", format_count), show(event, "seconds", format_duration)
        parts.append(f"{steps} steps in {seconds}")
    if event.get("exit_code"):
        parts.append(f"exit code {clean(event['exit_code'])}")
    if event.get("reason"):
        parts.append(clean(event["reason"]))
    return "  ".join(parts)


# -- the end ---------------------------------------------------------------------------------------------


def summary_lines(summary: Fields, report: object = None) -> list[str]:
    """The result as a table, the checks, and where the report lies."""
    rows = [(label, section(summary, key)) for key, label in RESULT_ROWS if section(summary, key)]
    lines: list[str] = []
    if rows:
        lines.append(f"{'':<20}" + "".join(f"  {label:>10}" for _, label, _ in RESULT_COLUMNS))
        lines += [
            f"{label:<20}" + "".join(f"  {show(row, key, form):>10}" for key, _, form in RESULT_COLUMNS)
            for label, row in rows
        ]
    lines += _interval_line(section(summary, "student"))
    lines += [clean(sentence) for sentence in items(summary, "story")]
    for check in items(summary, "checks"):
        if isinstance(check, Mapping):
            word = "passed" if check.get("passed") else "failed"
            told = f": {clean(check['text'])}" if check.get("text") else ""
            lines.append(f"check {word}  {clean(check.get('name'))}{told}")
    if report is not None:
        lines.append(f"report  {clean(report)}")
    return lines


def _interval_line(student: Fields) -> list[str]:
    """How sure the student's numbers are, in one line of at most 80 characters."""
    told = [
        f"{label} {show_interval(student, key, form)}"
        for key, label, form in (("perplexity", "perplexity", format_result), ("kl", "KL", format_result))
        if show_interval(student, key, form)
    ]
    if not told:
        return []
    return [f"95 % interval over {show(student, 'documents', format_count)} documents: student's {', '.join(told)}"]


# -- a model on its own ----------------------------------------------------------------------------------

ASSESSMENT_ROWS: tuple[tuple[str, str, Format], ...] = (
    ("perplexity", "perplexity", format_result),
    ("bits_per_byte", "bits/byte", format_result),
    ("kl", "KL to teacher", format_result),
    ("agreement", "agreement", format_percent),
    ("top5_agreement", "teacher's in top 5", format_percent),
    ("top5_overlap", "top-5 overlap", format_percent),
    ("acceptance", "acceptance", format_percent),
    ("calibration_error", "calibration error", format_percent),
    ("parameters", "parameters", format_count),
    ("weight_megabytes", "weights, MB", format_result),
    ("tokens_per_second", "tokens/s", format_count),
    ("documents", "documents", format_count),
    ("tokens", "tokens scored", format_count),
    ("unscored_tokens", "tokens not scored", format_count),
)


def assessment_lines(result: Fields) -> list[str]:
    """The yardsticks of a model, one a line, and of its teacher beside it."""
    voices = [(name, section(result, name)) for name in ("student", "teacher") if section(result, name)]
    lines = [f"{key:<6}  {clean(result[key])}" for key in ("model", "data", "device") if result.get(key)]
    has_intervals = any(section(row, "intervals") for _, row in voices)

    def line(label: str, values: Sequence[str], bounds: Sequence[str]) -> str:
        cells = (
            f"  {value:>12}" + (f"  {bound:<15}" if has_intervals else "")
            for value, bound in zip(values, bounds, strict=True)
        )
        return f"{label:<18}{''.join(cells)}".rstrip()

    if len(voices) > 1 or has_intervals:
        lines.append(line("", [name for name, _ in voices], ["95 % interval"] * len(voices)))
    for key, label, form in ASSESSMENT_ROWS:
        values = [show(row, key, form) for _, row in voices]
        bounds = [show_interval(row, key, form) for _, row in voices]
        if any(value != "-" for value in values):
            lines.append(line(label, values, bounds))
    if reading(result, "retention") is not None:
        lines.append(
            f"retention  {show(result, 'retention', format_percent)} (teacher's perplexity over the student's)"
        )
    memory = " and ".join(
        f"{show(result, key, format_result)} GB {where}"
        for key, where in (("memory_gb", "of the process"), ("gpu_memory_gb", "on the GPU"))
        if as_number(result.get(key))
    )
    return [*lines, f"memory  {memory}"] if memory else lines


# -- a quarantined batch ---------------------------------------------------------------------------------

_SHOWN_TEXTS = 4
_SHOWN_CHARACTERS = 160


def replay_lines(result: Fields) -> list[str]:
    """What a quarantined batch did then and does now."""
    then, now = section(result, "then"), section(result, "now")
    lines = [
        f"step {result.get('step')}, scored again with the checkpoint of step {result.get('checkpoint')}",
        f"then  {clean(then.get('verdict'))}: {clean(then.get('reason'))}",
        f"      loss {show(then, 'loss', format_loss)}  grad {show(then, 'grad_norm', format_norm)}",
    ]
    if then.get("located"):
        lines.append(f"      {clean(then['located'])}")
    lines.append(f"now   loss {show(now, 'loss', format_loss)}  grad {show(now, 'grad_norm', format_norm)}")
    lines.append(f"      {clean(now['located'])}" if now.get("located") else "      finite throughout")
    for name, text in list(zip(items(result, "samples"), items(result, "text"), strict=False))[:_SHOWN_TEXTS]:
        lines.append(f"sample {clean(name)}: {clip(text, _SHOWN_CHARACTERS)}")
    return lines
