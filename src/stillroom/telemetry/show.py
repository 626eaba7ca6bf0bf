"""The lines a command prints at its end: the table of a run, the figures of a model, a quarantined batch.

The figures of `stillroom eval` as rows are here for the page and the model card too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stillroom.metrics.metrics import MIN_DOCUMENTS
from stillroom.telemetry.record import Fields, Format, items, reading, section, show, show_interval
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
)

# The rows of the table: key in summary.json, label on the screen.
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


# -- a run ---------------------------------------------------------------------------------------------


def summary_lines(summary: Fields, report: object = None) -> list[str]:
    """The result as a table, the checks, and the path of the report."""
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
            detail = f": {clean(check['text'])}" if check.get("text") else ""
            lines.append(f"check {word}  {clean(check.get('name'))}{detail}")
    if report is not None:
        lines.append(f"report  {clean(report)}")
    return lines


def _interval_line(student: Fields) -> list[str]:
    """The intervals of the student's numbers, in one line of at most 80 characters."""
    ranges = [
        f"{label} {show_interval(student, key, form)}"
        for key, label, form in (("perplexity", "perplexity", format_result), ("kl", "KL", format_result))
        if show_interval(student, key, form)
    ]
    if not ranges:
        return no_interval_lines(student)
    return [f"95 % interval over {show(student, 'documents', format_count)} documents: student's {', '.join(ranges)}"]


def no_interval_lines(row: Fields) -> list[str]:
    """A line that explains a missing interval, if the documents are too few for one."""
    documents = as_number(row.get("documents"))
    if documents is None or documents >= MIN_DOCUMENTS:
        return []
    return [f"no 95 % interval: it takes {MIN_DOCUMENTS} held-out documents (scored: {format_count(documents)})"]


# -- what a student retains of its teacher's figures -----------------------------------------------------

# Quality: the share that is retained, 1 for a student as good as its teacher.
_LOWER_IS_BETTER = ("perplexity", "bits_per_byte", "answer_perplexity")
_HIGHER_IS_BETTER = ("choice_accuracy", "choice_accuracy_by_byte", "exact_match")
QUALITY = (*_LOWER_IS_BETTER, *_HIGHER_IS_BETTER)
# Cost: how many times the teacher's.
_COSTS = (
    "parameters", "weight_megabytes", "disk_megabytes", "load_seconds", "tokens_per_second",
    "prefill_tokens_per_second", "decode_tokens_per_second", "peak_memory_gb",
)  # fmt: skip


def retained(student: Fields, teacher: Fields) -> dict[str, float]:
    """For quality the share of the teacher's that is retained, for cost how many times the teacher's it is.

    Figures that one of both lacks are left out.
    """
    ours, theirs = ({**row, **(row.get("questions") or {})} for row in (student, teacher))
    shares = {}
    for name in (*QUALITY, *_COSTS):
        top, bottom = as_number(ours.get(name)), as_number(theirs.get(name))
        if name in _LOWER_IS_BETTER:
            top, bottom = bottom, top
        if top is not None and bottom:
            shares[name] = top / bottom
    return shares | _of_tasks(section(student, "tasks"), section(teacher, "tasks"))


def _of_tasks(ours: Fields, theirs: Fields) -> dict[str, float]:
    """Of each benchmark's figures of which it is known whether higher is better, as `task/figure`."""
    shares = {}
    for task in ours:
        mine, other = section(ours, task), section(theirs, task)
        for name, is_higher in section(mine, "higher_is_better").items():
            top, bottom = as_number(mine.get(name)), as_number(other.get(name))
            if is_higher is False:
                top, bottom = bottom, top
            if is_higher is not None and top is not None and bottom:
                shares[task_key(task, name)] = top / bottom
    return shares


def task_key(task: str, figure: str) -> str:
    return f"{task}/{figure}"


def show_retained(shares: Fields, name: str) -> str:
    """`98.5%` of a quality, `0.24x` of a cost; empty if there is none."""
    value = as_number(shares.get(name))
    if value is None:
        return ""
    return format_percent(value) if name in QUALITY or name not in _COSTS else f"{format_result(value)}x"


# -- the figures of a model ------------------------------------------------------------------------------

ASSESSMENT_ROWS: tuple[tuple[str, str, Format], ...] = (
    ("perplexity", "perplexity", format_result),
    ("bits_per_byte", "bits/byte", format_result),
    ("kl", "KL to teacher", format_result),
    ("kl_per_byte", "KL, bits/byte", format_result),
    ("text_agreement", "same text, greedy", format_percent),
    ("continued_prompts", "texts continued", format_count),
    ("agreement", "agreement", format_percent),
    ("top5_agreement", "teacher's in top 5", format_percent),
    ("top5_overlap", "top-5 overlap", format_percent),
    ("acceptance", "acceptance", format_percent),
    ("calibration_error", "calibration error", format_percent),
    ("parameters", "parameters", format_count),
    ("weight_megabytes", "weights, MB", format_result),
    ("disk_megabytes", "on disk, MB", format_result),
    ("load_seconds", "load, s", format_result),
    ("tokens_per_second", "tokens/s", format_count),
    ("prefill_tokens_per_second", "reading, tokens/s", format_count),
    ("decode_tokens_per_second", "writing, tokens/s", format_result),
    ("peak_memory_gb", "peak memory, GB", format_result),
    ("questions", "questions", format_count),
    ("choice_accuracy", "choices right", format_percent),
    ("choice_accuracy_by_byte", "choices, by byte", format_percent),
    ("exact_match", "exact match", format_percent),
    ("answer_perplexity", "answer perplexity", format_result),
    ("too_long", "questions too long", format_count),
    ("documents", "documents", format_count),
    ("tokens", "tokens scored", format_count),
    ("unscored_tokens", "tokens not scored", format_count),
)
_SAMPLES = "samples"  # of a benchmark, a count
_NO_FIGURES = ("intervals", "higher_is_better")


@dataclass(frozen=True)
class Side:
    """One model's figure as text, `-` where there is none, and its interval, empty where there is none."""

    value: str
    interval: str


@dataclass(frozen=True)
class FigureRow:
    label: str
    student: Side
    teacher: Side
    retained: str  # empty where there is nothing to compare


def figure_rows(result: Fields) -> list[FigureRow]:
    """Every figure that at least one of both models has, those of questions and benchmarks included."""
    student, teacher = (_flat(section(result, role)) for role in ("student", "teacher"))
    kept = section(result, "retained")
    rows = [
        FigureRow(label, _side(student, key, form), _side(teacher, key, form), show_retained(kept, key))
        for key, label, form in ASSESSMENT_ROWS
    ]
    rows += _task_rows(section(student, "tasks"), section(teacher, "tasks"), kept)
    return [row for row in rows if (row.student.value, row.teacher.value) != ("-", "-")]


def _task_rows(ours: Fields, theirs: Fields, kept: Fields) -> Iterator[FigureRow]:
    for task in dict.fromkeys([*ours, *theirs]):
        mine, other = section(ours, task), section(theirs, task)
        for name in dict.fromkeys([*mine, *other]):
            if name not in _NO_FIGURES:
                form = format_count if name == _SAMPLES else format_result
                share = show_retained(kept, task_key(task, name))
                yield FigureRow(f"{task} {name}", _side(mine, name, form), _side(other, name, form), share)


def _side(row: Fields, key: str, form: Format) -> Side:
    return Side(show(row, key, form), show_interval(row, key, form))


def _flat(row: Fields) -> Fields:
    """A model's figures with those of its questions."""
    asked = section(row, "questions")
    return {**row, **asked, "intervals": {**section(row, "intervals"), **section(asked, "intervals")}}


_MAX_LABEL = 40


def assessment_lines(result: Fields) -> list[str]:
    """The figures of a model, one a line, next to those of its teacher."""
    voices = [(name, section(result, name)) for name in ("student", "teacher") if section(result, name)]
    lines = [f"{key:<6}  {clean(result[key])}" for key in ("model", "data", "device") if result.get(key)]
    lines += _figure_table(result, [name for name, _ in voices])
    if reading(result, "retention") is not None:
        lines.append(
            f"retention  {show(result, 'retention', format_percent)} (teacher's perplexity over the student's)"
        )
    memory = " and ".join(
        f"{show(result, key, format_result)} GB {where}"
        for key, where in (("memory_gb", "of the process"), ("gpu_memory_gb", "on the GPU"))
        if as_number(result.get(key))
    )
    lines += [f"memory  {memory}"] if memory else []
    lines += no_interval_lines(voices[0][1]) if voices and not section(voices[0][1], "intervals") else []
    lines += [f"note  {name}: {clean(text)}" for name, row in voices for text in row.get("notes") or ()]
    return [*lines, *(f"note  {clean(note)}" for note in items(result, "notes"))]


def _figure_table(result: Fields, names: Sequence[str]) -> list[str]:
    """A line for each figure: both models, each with its interval where there are any, and what is retained."""
    rows = figure_rows(result)
    has_intervals = any(row.student.interval or row.teacher.interval for row in rows)
    labels = [clip(row.label, _MAX_LABEL) for row in rows]
    width = max([18, *map(len, labels)])

    def line(label: str, values: Sequence[str], bounds: Sequence[str], share: str) -> str:
        cells = (
            f"  {value:>12}" + (f"  {bound:<15}" if has_intervals else "")
            for value, bound in zip(values, bounds, strict=True)
        )
        return f"{label:<{width}}{''.join(cells)}{share:>10}".rstrip()

    lines = []
    if len(names) > 1 or has_intervals:
        head = "retained" if any(row.retained for row in rows) else ""
        lines.append(line("", names, ["95 % interval"] * len(names), head))
    for label, row in zip(labels, rows, strict=True):
        sides = [row.student if name == "student" else row.teacher for name in names]
        lines.append(line(label, [side.value for side in sides], [side.interval for side in sides], row.retained))
    return lines


# -- a quarantined batch ---------------------------------------------------------------------------------

_SHOWN_TEXTS = 4
_SHOWN_CHARACTERS = 160


def replay_lines(result: Fields) -> list[str]:
    """What a quarantined batch did in the run and does now."""
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


# -- lines -----------------------------------------------------------------------------------------
# Format events as lines of plain text.
#
# Lower case, units, ASCII, one thing a line. Nothing here depends on a terminal. The lines at the end of a command
# are in results.py.


NUM_SAMPLES_NAMED = 3
SAMPLE_WIDTH = 66
_MOSTLY = 0.9  # below this share of scored tokens, print their number


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
    lines += _partial_lines(schedule)
    if "learning_rate" in schedule:
        lines.append(f"learning rate {show(schedule, 'learning_rate', format_lr)} at its peak")
    return lines


def _partial_lines(schedule: Fields) -> list[str]:
    """The last window of an epoch, where the batches do not fill it: 74,823 are 4,676 windows of 16 and one of 7."""
    batches = int(as_number(schedule.get("total_batches")) or 0)
    size = int(as_number(schedule.get("gradient_accumulation")) or 1) * int(as_number(schedule.get("processes")) or 1)
    whole, rest = divmod(batches, size)
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


# -- steps -----------------------------------------------------------------------------------------------


def step_counters(event: Fields, skipped: int) -> list[str]:
    """Loss, terms and counters of a step. Terms are weighted, so that they add up to the loss."""
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


# -- what happens between steps --------------------------------------------------------------------------


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
    if event.get("best"):
        parts.append("best")
    unscored = as_number(event.get("unscored_tokens"))
    if unscored:
        parts.append(f"unscored {format_count(unscored)} tokens")
    return "  ".join(parts)


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
