"""The model card: where a student comes from, what was measured, and what was not.

Only what the run recorded is written, and figures with their intervals. Names and texts come from configurations and
folders that others wrote, so they are cleaned and put between backticks. A local path is shortened to its last part:
a model card is published, the folders of the machine that trained are not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from stillroom.telemetry.record import Evaluated
from stillroom.telemetry.results import (
    ANSWER_COLUMNS,
    ASSESSMENT_ROWS,
    RESULT_COLUMNS,
    RESULT_ROWS,
    answer_rows,
    figure_rows,
)
from stillroom.telemetry.wording import (
    as_number,
    clean,
    clip,
    format_bytes,
    format_count,
    format_duration,
    section,
    show,
    show_interval,
)

_LONGEST = 120
_MOST_ROWS = 120
# Of the figures, those that measure quality: speed and memory are of one machine.
_QUALITY = ("perplexity", "bits_per_byte", "kl", "agreement", "top5_agreement", "acceptance", "choice_accuracy",
            "exact_match")  # fmt: skip
_OWN_LABELS = frozenset(label for _key, label, _form in ASSESSMENT_ROWS)
_LIMITS = (
    "It was measured on the held-out text named above and on nothing else: what it does elsewhere is not known.",
    "A student repeats what its teacher gets wrong, and adds its own errors.",
    "Nothing was done to make its answers safe, and nothing was measured about that.",
)


def model_card(
    *,
    title: str,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    versions: Mapping[str, Any],
    model: Mapping[str, Any],
    checked: Sequence[str],
    evaluated: Evaluated | None = None,
    origin: Origin | None = None,
) -> str:
    """The model card as text. `model` holds family, parameters, dtype, positions, bytes; `checked` what was compared.

    `evaluated` are figures of `stillroom eval`; those of another student than the one exported are left out.
    """
    origin = origin or Origin.of(config)
    parts = [
        _front(model, origin, _index(title, config, summary, evaluated or Evaluated())),
        f"# {_text(title)}\n",
        _what(model, bool(config)),
        _usage(model),
        _provenance(config, summary, origin),
        _figures(summary),
        _answers(summary),
        _evaluated(evaluated or Evaluated()),
        "## Limits\n\n" + "\n".join(f"- {line}" for line in _LIMITS),
        "## How it was written\n\n" + "\n".join(f"- {clean(line)}" for line in checked),
        _versions(versions),
        "## Licence\n\nNot stated here: whoever publishes this model decides, within the licences of the teacher, of "
        "the weights the student began from, and of the data. Write it here, and as `license:` at the top.",
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


@dataclass(frozen=True)
class Origin:
    """Where the student's weights come from: in words, and as a hub id if it is one."""

    words: str
    base_model: str = ""

    @staticmethod
    def of(config: Mapping[str, Any], *, local: Collection[str] = (), layers: tuple[int, int] | None = None) -> Origin:
        """From a run's configuration. `local` are the settings that named folders; `layers` those kept, of how many."""
        student, teacher = section(config, "student"), section(config, "teacher")
        is_cut = student.get("init") == "shrink"
        key, name = ("teacher.model", teacher.get("model")) if is_cut else ("student.model", student.get("model"))
        is_hub_id = isinstance(name, str) and key not in local and bool(_HUB_ID.fullmatch(name))
        if is_cut:
            share = f", {layers[0]:,} of {layers[1]:,} layers" if layers else ""
            rounds = section(student, "shrink").get("rounds", 1)
            share += f", in {rounds} rounds of cutting and recovering" if rounds != 1 else ""
            return Origin(f"cut from its teacher {short_name(name)}{share}", str(name) if is_hub_id else "")
        if student.get("init") == "random" or name == "builtin:student":
            return Origin(f"random weights in the shape of {short_name(name)}")
        adapted = ", trained by an adapter that is merged in" if student.get("adapter") else ""
        return Origin(f"{short_name(name)}{adapted}", str(name) if is_hub_id else "")


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # also what may stand in YAML as it is


def _front(model: Mapping[str, Any], origin: Origin, results: Sequence[Mapping[str, Any]]) -> str:
    tags = ["distillation", "stillroom"]
    lines = ["library_name: transformers", "pipeline_tag: text-generation", f"tags: {json.dumps(tags)}"]
    lines += [f"base_model: {json.dumps(origin.base_model)}"] if origin.base_model else []
    lines += [f"model-index: {json.dumps(results)}"] if results else []  # JSON is YAML
    return "\n".join(["---", *(lines if model.get("format", "hf") == "hf" else lines[1:]), "---"])


def _index(
    title: str, config: Mapping[str, Any], summary: Mapping[str, Any], evaluated: Evaluated
) -> list[dict[str, Any]]:
    """The student's figures as the Hub reads them: those of the run, and of `stillroom eval` those known to be its."""
    record = {} if evaluated.doubt else evaluated.record
    measured = section(record, "student")
    tasks = section(measured, "tasks")
    held_out = section(config, "data").get("eval")
    results = [
        _result([held_out] if held_out else _data(config), section(summary, "student"), _QUALITY),
        _result(str(record.get("data")).split(", "), {**measured, **section(measured, "questions")}, _QUALITY),
        *(_result([task], section(tasks, task), [key for key in section(tasks, task) if key != "samples"])
          for task in tasks),
    ]  # fmt: skip
    found = [result for result in results if result["metrics"]][:_MOST_ROWS]
    return [{"name": _bare(title), "results": found}] if found else []


def _result(data: Sequence[object], row: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The figures of a row on one text. A value that is not a finite number is left out."""
    name = ", ".join(_bare(short_name(one)) for one in data)
    kind = name.removeprefix("hf:").partition(":")[0] if name.startswith("hf:") and len(data) == 1 else name
    metrics = [
        {"type": _bare(key), "name": _bare(key), "value": number}
        for key in keys
        if (number := as_number(row.get(key))) is not None
    ]
    return {"task": {"type": "text-generation"}, "dataset": {"name": name, "type": kind}, "metrics": metrics}


def _bare(value: object) -> str:
    """A name as metadata: without markup, and without the line that ends metadata."""
    return re.sub(r"[^\w .,:/()+-]|-(?=-)", "", _text(value)).strip()


def _what(model: Mapping[str, Any], is_of_run: bool) -> str:
    kind = "student distilled with Stillroom" if is_of_run else "model written by Stillroom, not trained by it"
    lines = [
        f"A {kind}.\n",
        f"- family: {_text(model.get('family'))}",
        f"- parameters: {format_count(float(model.get('parameters') or 0))}",
        f"- weights: {_text(model.get('dtype'))}, {format_bytes(float(model.get('bytes') or 0))}",
    ]
    if model.get("positions"):
        lines.append(f"- positions: {format_count(float(model['positions']))}")
    return "\n".join(lines)


_LOAD = """from transformers import AutoModelForCausalLM, AutoTokenizer

name = "."  # this folder, or its id on the hub
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
"""
_ASK = """inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
"""
_CHAT = """messages = [{"role": "user", "content": "What is distillation?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
"""
_WRITE = """written = model.generate(**inputs, max_new_tokens=64)
print(tokenizer.decode(written[0], skip_special_tokens=True))
"""


def _usage(model: Mapping[str, Any]) -> str:
    """How to load it and let it write, with transformers and with llama.cpp where there is a file for it."""
    blocks = []
    if model.get("format", "hf") == "hf":
        blocks.append(f"```python\n{_LOAD}{_CHAT if model.get('has_chat') else _ASK}{_WRITE}```")
    if model.get("file") or model.get("format") == "gguf":
        file = clean(model.get("file") or "model.gguf").replace("`", "'")
        blocks.append(f'```bash\nllama-cli -m {file} -p "Once upon a time" -n 64\n```')
    return "## Use\n\n" + "\n\n".join(blocks) if blocks else ""


def _provenance(config: Mapping[str, Any], summary: Mapping[str, Any], origin: Origin) -> str:
    if not config:
        return (
            "## Where it comes from\n\nNo record of a run was found with these weights, so nothing is known about it."
        )
    train = section(config, "train")
    rows = [
        ("teacher", short_name(section(config, "teacher").get("model"))),
        ("student began as", origin.words),
        ("data", ", ".join(short_name(name) for name in _data(config)) or "-"),
        ("held-out data", short_name(section(config, "data").get("eval") or "a share of the data")),
        ("tokens trained on", show(summary, "tokens", format_count)),
        ("steps", show(summary, "steps", format_count)),
        ("time", _time(summary)),
        ("objective", _objective(config)),
        ("precision", _text(summary.get("precision") or section(config, "precision").get("mode"))),
        ("learning rate", _text(train.get("learning_rate"))),
        ("seed", _text(train.get("seed"))),
        ("ended", _text(summary.get("status") or "not finished")),
    ]
    return "## Where it comes from\n\n" + "\n".join(f"- {label}: {value}" for label, value in rows)


def _time(summary: Mapping[str, Any]) -> str:
    training, total = show(summary, "seconds", format_duration), show(summary, "total_seconds", format_duration)
    return f"{training} of training" + (f", {total} in all" if "total_seconds" in summary else "")


def _data(config: Mapping[str, Any]) -> list[str]:
    train = section(config, "data").get("train") or []
    if isinstance(train, str):
        return [train]
    return [str(source.get("path")) for source in train if isinstance(source, Mapping)]


def _objective(config: Mapping[str, Any]) -> str:
    """Each term with a weight, and what it is made of."""
    parts = []
    for name, terms in section(config, "objectives").items():
        if not isinstance(terms, Mapping) or not terms.get("weight"):
            continue
        more = [f"{key} {terms[key]}" for key in ("divergence", "temperature", "kind") if terms.get(key) is not None]
        parts.append(f"{name} x {terms['weight']:g}" + (f" ({', '.join(more)})" if more else ""))
    return _text(", ".join(parts) or "-")


def _figures(summary: Mapping[str, Any]) -> str:
    """The table of results, each with its 95 % interval where one was computed."""
    rows = [(label, section(summary, key)) for key, label in RESULT_ROWS if section(summary, key)]
    if not rows:
        return ""
    head = "| | " + " | ".join(label for _key, label, _form in RESULT_COLUMNS) + " |"
    rule = "|---|" + "---:|" * len(RESULT_COLUMNS)
    lines = [head, rule]
    for label, row in rows:
        cells = []
        for key, _label, form in RESULT_COLUMNS:
            bounds = show_interval(row, key, form)
            cells.append(show(row, key, form) + (f" ({bounds})" if bounds else ""))
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    told = "On held-out text; in brackets 95 % intervals by bootstrap over documents, where there were enough of them."
    return f"## Figures\n\n{told}\n\n" + "\n".join(lines)


def _answers(summary: Mapping[str, Any]) -> str:
    """What the models wrote to held-out prompts; empty where none were answered."""
    rows = answer_rows(summary)
    if not rows:
        return ""
    lines = ["| | " + " | ".join(label for _key, label, _form in ANSWER_COLUMNS) + " |"]
    lines.append("|---|" + "---:|" * len(ANSWER_COLUMNS))
    for label, row in rows:
        cells = (show(row, key, form) + _bounds(show_interval(row, key, form)) for key, _, form in ANSWER_COLUMNS)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    told = f"Held-out prompts, answered. The student was chosen by {_text(summary.get('select'))}."
    return f"## Answers\n\n{told}\n\n" + "\n".join(lines)


def _bounds(interval: str) -> str:
    return f" ({interval})" if interval else ""


def _evaluated(evaluated: Evaluated) -> str:
    """Teacher, student and what is retained, by figure."""
    record = evaluated.record
    if not record:
        return ""
    if evaluated.doubt:
        return (
            "## Measured by stillroom eval\n\nNot shown: the figures in the run's folder are not known to be those of "
            "this student."
        )
    has_teacher = bool(section(record, "teacher"))
    heads = ("teacher", "student", "retained") if has_teacher else ("student",)
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    rows = figure_rows(record)
    for row in rows[:_MOST_ROWS]:
        teacher, student = (
            side.value + (f" ({side.interval})" if side.interval else "") for side in (row.teacher, row.student)
        )
        cells = [teacher, student, row.retained or "-"] if has_teacher else [student]
        lines.append(f"| {_label(row.label)} | " + " | ".join(cells) + " |")
    beside = f", next to {short_name(record.get('teacher_model'))}" if has_teacher else ""
    told = (
        f"On {_measured_on(record)}{beside}, in float32, before it was written in the form of these files. "
        "In brackets 95 % intervals. Retained: of quality the share of the teacher's (perplexities and bits inverted), "
        "of size and speed how many times the teacher's. Seconds, speed and memory are of one sitting on one machine."
    )
    if len(rows) > _MOST_ROWS:
        told += f" {len(rows) - _MOST_ROWS:,} more figures were measured."
    return f"## Measured by stillroom eval\n\n{told}\n\n" + "\n".join(lines)


def _measured_on(record: Mapping[str, Any]) -> str:
    names = ", ".join(short_name(name) for name in str(record.get("data") or "-").split(", "))
    return f"the held-out share of {names}" if section(record, "settings").get("text") else names


def _label(label: str) -> str:
    """A figure's name in a cell: ours as it is, that of a benchmark, which others named, as inert code."""
    return label if label in _OWN_LABELS else _text(label).replace("|", "/")


def _versions(versions: Mapping[str, Any]) -> str:
    if not versions:
        return ""
    return "## Versions\n\n" + ", ".join(f"{clean(name)} {clean(value)}" for name, value in versions.items())


def short_name(name: object) -> str:
    """A hub id or builtin name as it is; of a path its last part."""
    text = str(name) if name else "-"
    is_path = text.startswith(("/", ".", "~", "\\")) or text.count("/") > 1 or ":\\" in text
    return _text(PurePath(text.replace("\\", "/")).name if is_path else text)


def _text(value: object) -> str:
    """A value as inert code: no markup of Markdown or HTML is read between backticks."""
    return "`" + (clip(value, _LONGEST).replace("`", "'") or "-") + "`"
