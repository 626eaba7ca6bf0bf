"""The figures, the plot and the page of the benchmark, drawn from its result files and from nothing else."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from arms import ARMS, CUT, LENGTH, NARROW, ROWS, SCALES, order, trials
from budget import is_bracketed

from figures import evaluate

Record = dict[str, Any]
Job = tuple[Any, ...]
Arms = dict[tuple[str, int], Record]
TEXTS = {"test": "documentation", "stories": "stories", "far": "C++ headers"}
BARS = {"test": 0.85, "stories": 0.75, "prompts": 0.60}  # of the best recipe
SHOWN = ("teacher", "cut", "plain", "kl", "best")
NUM_RESAMPLES, SEED = 2000, 20150
FIGURES = "benchmarks/real/results/figures.json"


# -- result files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """The result files: one for each job, and the plan."""

    folder: Path

    def file(self, job: Job) -> Path:
        kind, *rest = job
        names = [f"{one:g}" if isinstance(one, float) else str(one) for one in rest]
        return self.folder / f"{kind}s" / f"{'-'.join(names)}.json"

    def jobs(self) -> set[Job]:
        """The jobs that have a file."""
        found: set[Job] = set()
        for path in self.folder.glob("*s/*.json"):
            kind, name = path.parent.name[:-1], path.stem
            first, _, last = name.rpartition("-")
            match kind:
                case "arm":
                    found.add((kind, first, int(last)))
                case "trial":
                    record = _read(path)
                    found.add((kind, record["arm"], record["rate"]))
                case "file":
                    found.add((kind, first, last))
                case _:
                    found.add((kind, name))
        return found

    @property
    def plan(self) -> Record:
        return _read(self.folder / "plan.json")

    def read(self, *job: Any) -> Record:
        return _read(self.file(job))

    def timing(self, name: str) -> Record:
        return self.read("timing", name)

    def tried(self, name: str) -> dict[float, float]:
        """Dev bits per byte by learning rate."""
        records = (self.read(*job) for job in self.jobs() if job[:2] == ("trial", name))
        return {record["rate"]: record["dev_bits_per_byte"] for record in records}

    def chosen_rate(self, name: str) -> float:
        tried = self.tried(name)
        return min(tried, key=lambda rate: tried[rate])

    def arms(self) -> Arms:
        """The arms that are done, in order. All must have been judged on the very same texts."""
        wanted = order(SCALES[self.plan["scale"]])
        found = {key: _read(path) for key in wanted if (path := self.file(("arm", *key))).exists()}
        for text in TEXTS:
            if len({record[text]["sha256"] for record in found.values()}) > 1:
                raise SystemExit(f"arms of {self.folder} were judged on different files of {text}: remove some")
        return found


def _read(path: Path) -> Record:
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


# -- figures ---------------------------------------------------------------------------------------------


def figures(results: Results) -> Record:
    """All that is told of the results, as numbers."""
    arms, jobs, plan = results.arms(), results.jobs(), results.plan
    made: Record = {
        "plan": {"hours": plan["hours"], "workers": plan["workers"], "arm_cpu_hours": plan["arm_cpu_seconds"] / 3600},
        "text": _text(results),
        "arms": {name: _arm(arms, name) for name, seed in arms if seed == 0},
        "lead": {},
        "files": {},
    }
    made["held_out"] = {
        text: {"tokens": arms["teacher", 0][text]["tokens"], "documents": len(arms["teacher", 0][text]["documents"])}
        for text in TEXTS
    }
    for better, than in (("kl", "plain"), ("best", "plain"), ("kl-written", "kl-docs"), ("narrow-kl", "narrow-plain")):
        if {(better, 0), (than, 0)} <= set(arms):
            made["lead"][f"{better} over {than}"] = {text: lead(arms, better, than, text) for text in TEXTS}
    for kind, *rest in sorted(job for job in jobs if job[0] == "file"):
        record = results.read(kind, *rest)
        made["files"][" ".join(rest)] = {
            "megabytes": record["bytes"] / 1e6, "tokens_per_cpu_second": record["tokens_per_cpu_second"],
        }  # fmt: skip
    return made


def _text(results: Results) -> Record:
    made = results.read("text", "all") if ("text", "all") in results.jobs() else {}
    told: Record = {name: made.get(name, 0) for name in ("tokens", "docs_tokens")}
    told["prompts_seen"] = len(made.get("prompts_seen", []))
    for kind in SCALES[results.plan["scale"]].written_tokens:
        written = results.read("write", kind) if ("write", kind) in results.jobs() else {}
        told[kind] = {name: written.get(name, 0) for name in ("tokens", "rows", "cpu_seconds")}
    told["write_cpu_hours"] = sum(told[kind]["cpu_seconds"] for kind in ("chat", "plain")) / 3600
    return told


def seeds_of(arms: Arms, name: str) -> list[Record]:
    return [record for (arm, _seed), record in arms.items() if arm == name]


def _cut_of(name: str) -> tuple[str, int]:
    """The cut student that an arm's is compared with: one for all arms of a size, whatever their own cut was."""
    return "narrow-cut" if ARMS[name].student == NARROW else "cut", 0


def won_back(arms: Arms, name: str, text: str) -> list[float]:
    """Of the bits per byte that the cut added, the share an arm won back; one for each seed."""
    cut = arms[_cut_of(name)][text]["bits_per_byte"]
    added = cut - arms["teacher", 0][text]["bits_per_byte"]
    return [(cut - record[text]["bits_per_byte"]) / added for record in seeds_of(arms, name)]


def answered(arms: Arms, name: str) -> list[float]:
    """Of the prompts that the teacher answers, the share an arm answers; one for each seed."""
    known = {one["prompt"] for one in arms["teacher", 0]["answers"] if one["is_right"]}
    return [
        sum(one["is_right"] for one in record["answers"] if one["prompt"] in known) / max(len(known), 1)
        for record in seeds_of(arms, name)
    ]


def _arm(arms: Arms, name: str) -> Record:
    """An arm's figures, means over its seeds."""
    records, first = seeds_of(arms, name), arms[name, 0]
    made: Record = {
        "seeds": len(records),
        "parameters": first["parameters"],
        "parameter_share": first["parameters"] / arms["teacher", 0]["parameters"],
        "answered": statistics.mean(answered(arms, name)),
        "prompts": len(first["answers"]),
        "right": sum(one["is_right"] for one in first["answers"]),
        "dev_bits_per_byte": statistics.mean(record["dev_bits_per_byte"] for record in records),
    }
    for text in TEXTS:
        made[text] = {"bits_per_byte": statistics.mean(record[text]["bits_per_byte"] for record in records)}
        made[text]["low"], made[text]["high"] = first[text]["interval"] or (math.nan, math.nan)
        if name not in ("teacher", "cut", "narrow-cut") and _cut_of(name) in arms:
            shares = won_back(arms, name, text)
            made[text] |= {"won_back": statistics.mean(shares), "least": min(shares), "most": max(shares)}
    if ARMS[name].is_trained:
        made |= {
            "cpu_hours": statistics.mean(sum(record["cpu_seconds"].values()) for record in records) / 3600,
            "planned_cpu_hours": first["planned_cpu_seconds"] / 3600,
            "tokens": statistics.mean(record["tokens"] for record in records),
            "steps": first["steps"],
            "rate": first["learning_rate"],
            "peak_gigabytes": max(record["peak_gigabytes"] for record in records),
            "skipped": sum(record["skipped"] for record in records),
        }
    return made


def lead(arms: Arms, better: str, than: str, text: str) -> Record:
    """Bits per byte by which one arm is ahead of another, with a 95 % interval.

    Paired: the same seeds, the same documents. Both are resampled (Efron and Tibshirani 1993), so that neither a lucky
    seed nor a single document decides.
    """
    seeds = [seed for arm, seed in arms if arm == better and (than, seed) in arms]
    documents = sorted(arms[better, 0][text]["documents"])
    sums = np.array([
        [[arms[arm, seed][text]["documents"][one][0] for one in documents] for seed in seeds] for arm in (than, better)
    ])  # fmt: skip
    sizes = np.array([arms[better, 0][text]["documents"][one][1] for one in documents], float)
    bits = (sums[0] - sums[1]) / math.log(2)  # [seeds, documents]
    generator = np.random.default_rng(SEED)
    drawn = generator.multinomial(len(documents), np.full(len(documents), 1 / len(documents)), NUM_RESAMPLES)
    chosen = generator.multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), NUM_RESAMPLES) / len(seeds)
    values = np.einsum("rs,sd,rd->r", chosen, bits, drawn.astype(float)) / (drawn @ sizes)
    low, high = np.quantile(values, (0.025, 0.975), method="inverted_cdf")
    return {"bits_per_byte": float(bits.mean(0).sum() / sizes.sum()), "low": float(low), "high": float(high),
            "seeds": len(seeds), "documents": len(documents)}  # fmt: skip


# -- page ------------------------------------------------------------------------------------------------


@dataclass
class Marks:
    """Figures of a page, each with the field of figures.json that it is from, as scripts/figures.py wants them."""

    table: Record
    fields: list[str] = field(default_factory=list)

    def __call__(self, path: str, form: str, *, percent: bool = False) -> str:
        source = f"100 * {path}" if percent else path
        self.fields.append(source)
        return f"<!--f{len(self.fields)}-->{evaluate(self.table, source):{form}}<!--/-->"

    def block(self) -> str:
        lines = [f"  f{number} = {source}" for number, source in enumerate(self.fields, start=1)]
        return "\n".join(["<!-- figures", FIGURES, *lines, "-->"])


def draw(results: Results, docs: Path | None) -> None:
    """Write figures and plot, and the page: into the documentation, or next to the results."""
    if not (results.folder / "plan.json").exists() or not {("teacher", 0), ("cut", 0)} <= set(results.arms()):
        return
    made = figures(results)
    (results.folder / "figures.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    picture = docs / "images" / "flagship.svg" if docs else results.folder / "flagship.svg"
    link = f"images/{picture.name}" if docs else picture.name
    text = page(results, made, link if plot(results, picture) else "")
    (docs / "results.md" if docs else results.folder / "results.md").write_text(text, encoding="utf-8")


def page(results: Results, made: Record, picture: str) -> str:
    """The page; it says what is missing, and which budget the arms had."""
    mark, arms = Marks(made), results.arms()
    parts = [
        "# A real model, halved on two cores",
        *_claim(mark, made),
        *([f"![Share of the lost quality that each arm won back, against CPU hours]({picture})"] if picture else []),
        "The plot is of dev text, on which students were chosen; the tables are of text that nothing was chosen on: "
        "bits per byte, then the share won back, from least to most where there are several seeds. *Won back*: of the "
        "bits per byte that the cut added, the share that training removed again; 100 % is the teacher. *Prompts*: of "
        "those that the teacher answers, the share the student answers.",
    ]
    for student, cut in ((CUT, "cut"), (NARROW, "narrow-cut")):
        if cut in made["arms"]:
            share = mark(f'arms["{cut}"].parameter_share', ".2f")
            parts += [f"## {student}: {share} of the parameters", _table(mark, made, student)]
    parts += ["## Distillation against plain training", *_leads(mark, made)]
    parts += ["## Files", *_files(mark, made)] if made["files"] else []
    parts += ["## Answers", *_answers(arms)]
    parts += ["## What did not work", "\n".join(f"- {line}" for line in _failures(results, mark, made))]
    parts += ["## How the test text was kept apart", *_kept_apart(results, mark, made)]
    parts += ["## How it was done, and how to repeat it", *_method(results, mark, made)]
    return "\n\n".join([*parts, mark.block()]) + "\n"


def _claim(mark: Marks, made: Record) -> Iterator[str]:
    arms = made["arms"]
    trained = [one for one in arms if "cpu_hours" in arms[one] and ARMS[one].student == CUT and not ARMS[one].file]
    if not trained:
        yield "No arm is trained yet."
        return
    name = min(trained, key=lambda one: float(arms[one]["dev_bits_per_byte"]))  # never by the text that is reported on
    path = f'arms["{name}"]'
    won = [f"{mark(f'{path}.{text}.won_back', '.0f', percent=True)} % on {told}" for text, told in TEXTS.items()]
    size, hours = mark(f"{path}.parameter_share", ".2f"), mark(f"{path}.cpu_hours", ".2f")
    yield (
        f"SmolLM2-135M-Instruct, cut to {size} of its parameters and recovered in {hours} hours of one CPU core "
        f"({ARMS[name].label}, the best arm on dev text), wins back {won[0]}, {won[1]} and {won[2]} of what the "
        f"cut lost, and answers {mark(f'{path}.answered', '.0f', percent=True)} % of the prompts that its "
        "teacher answers."
    )


def _table(mark: Marks, made: Record, student: str) -> str:
    head = ["", *TEXTS.values(), "prompts, %", "CPU hours", "tokens"]
    rows = [_row(head), _row(["---"] * len(head))]
    for name, told in made["arms"].items():
        if ARMS[name].student not in ("", student):
            continue
        path, cells = f'arms["{name}"]', [_label(name, told)]
        for text in TEXTS:
            cells.append(mark(f"{path}.{text}.bits_per_byte", ".3f") + _won(mark, told, path, text))
        cells.append(mark(f"{path}.answered", ".0f", percent=True))
        cells.append(mark(f"{path}.cpu_hours", ".2f") if "cpu_hours" in told else "")
        cells.append(mark(f"{path}.tokens", ",.0f") if "tokens" in told else "")
        rows.append(_row(cells))
    return "\n".join(rows)


def _won(mark: Marks, told: Record, path: str, text: str) -> str:
    if "won_back" not in told[text]:
        return ""
    mean = f", {mark(f'{path}.{text}.won_back', '.1f', percent=True)} %"
    if told["seeds"] == 1:
        return mean
    ends = [mark(f"{path}.{text}.{end}", ".1f", percent=True) for end in ("least", "most")]
    return f"{mean} ({' to '.join(ends)})"


def _label(name: str, told: Record) -> str:
    return ARMS[name].label + (f", {told['seeds']} seeds" if told["seeds"] > 1 else "")


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _leads(mark: Marks, made: Record) -> Iterator[str]:
    if not made["lead"]:
        yield "Not measured yet: it needs both arms."
        return
    rows = [_row(["at equal CPU seconds", *TEXTS.values(), "seeds"]), _row(["---"] * (len(TEXTS) + 2))]
    for name, by_text in made["lead"].items():
        better, _, than = name.partition(" over ")
        cells = [f"{_told(better)} over {_told(than)}"]
        for text in TEXTS:
            ahead, low, high = (mark(f'lead["{name}"].{text}.{end}', ".3f") for end in ("bits_per_byte", "low", "high"))
            is_sure = by_text[text]["low"] > 0 or by_text[text]["high"] < 0
            cells.append(f"{ahead} ({low} to {high}){'' if is_sure else ', includes 0'}")
        rows.append(_row([*cells, str(by_text["test"]["seeds"])]))
    yield "\n".join(rows)
    yield (
        "Bits per byte by which the first is better, with 95 % intervals by bootstrap over documents and seeds. "
        "With one seed the interval says nothing of other seeds. Plain training reads the same text, that of the "
        "teacher included, and more of it in the same time, because no teacher has to be asked."
    )


def _told(name: str) -> str:
    return f"{ARMS[name].label}{' (narrow)' if ARMS[name].student == NARROW else ''}"


def _files(mark: Marks, made: Record) -> Iterator[str]:
    rows = [_row(["GGUF file", "MB", "tokens a CPU second, llama.cpp"]), _row(["---"] * 3)]
    for name, told in made["files"].items():
        arm, form = name.rsplit(" ", 1)
        has_speed = told["tokens_per_cpu_second"] is not None
        speed = mark(f'files["{name}"].tokens_per_cpu_second', ".0f") if has_speed else "xllamacpp is not installed"
        rows.append(_row([f"{_told(arm)}, {form}", mark(f'files["{name}"].megabytes', ".1f"), speed]))
    yield "\n".join(rows)
    yield "One thread writes, from a short prompt. What rounding to four bits costs is in the first table."


def _answers(arms: Arms) -> Iterator[str]:
    shown = [name for name in SHOWN if (name, 0) in arms]
    yield (
        "Greedy continuations of the first ten prompts, seed 0, none left out; right answers are bold. All are in the "
        "files of the arms."
    )
    rows = [_row(["prompt", *(ARMS[name].label for name in shown)]), _row(["---"] * (len(shown) + 1))]
    for place, one in enumerate(arms["teacher", 0]["answers"][:10]):
        answers = [arms[name, 0]["answers"][place] for name in shown]
        rows.append(_row([_cell(one["prompt"]), *(_cell(told["text"], told["is_right"]) for told in answers)]))
    yield "\n".join(rows)


def _cell(text: str, is_bold: bool = False) -> str:
    """Text of a model in a table, where none of its signs is one of Markdown."""
    told = re.sub(r"[]\\[*_`~|<>&#{}$^+]", lambda sign: f"&#{ord(sign[0])};", " ".join(text.split()))
    return f"**{told}**" if is_bold and told else told


def _failures(results: Results, mark: Marks, made: Record) -> Iterator[str]:
    """What was hoped for and is not so; every line is decided by the result files."""
    arms = made["arms"]
    if "best" in arms:
        for text in ("test", "stories"):
            if arms["best"][text]["won_back"] < BARS[text]:
                got = mark(f'arms["best"].{text}.won_back', ".0f", percent=True)
                yield f"The best recipe was to win back {BARS[text]:.0%} on {TEXTS[text]}; it wins back {got} %."
        if arms["best"]["answered"] < BARS["prompts"]:
            got = mark('arms["best"].answered', ".0f", percent=True)
            yield f"It was to answer {BARS['prompts']:.0%} of the prompts that the teacher answers; it answers {got} %."
    others = {"q4-trained": "q4", "kl-written": "kl-docs"}  # of the same CPU seconds
    for name in ("best", "rounds", "cached", "kl-written", "q4-trained"):
        other = others.get(name, "kl")
        if {name, other} <= set(arms):
            for text in TEXTS:
                if arms[name][text]["bits_per_byte"] >= arms[other][text]["bits_per_byte"]:
                    ours, theirs = (mark(f'arms["{one}"].{text}.bits_per_byte', ".3f") for one in (name, other))
                    yield f"{_told(name)} is no better than {_told(other)} on {TEXTS[text]}: {ours} against {theirs}."
    for name, by_text in made["lead"].items():
        better, _, than = name.partition(" over ")
        unsure = [TEXTS[text] for text, told in by_text.items() if told["low"] <= 0 <= told["high"]]
        if unsure:
            yield f"The lead of {_told(better)} over {_told(than)} may be chance on {' and '.join(unsure)}."
    for name in trials():
        tried = results.tried(name)
        if tried and not is_bracketed(tried):
            end = "highest" if results.chosen_rate(name) == max(tried) else "lowest"
            yield f"The learning rate of {_told(name)} is the {end} tried, {results.chosen_rate(name):g}."
    for (name, seed), record in results.arms().items():
        if record.get("status", "done") != "done":
            yield f"{_told(name)}, seed {seed}, ended as {record['status']}."
        spent = sum(record.get("cpu_seconds", {}).values())
        planned = record.get("planned_cpu_seconds", spent)
        if abs(spent - planned) > 0.1 * planned:
            yield f"{_told(name)}, seed {seed}, took {spent:,.0f} CPU seconds where {planned:,.0f} were planned."
    done = set(results.arms())
    missing = [f"{_told(name)} (seed {seed})" for name, seed in order(SCALES[results.plan["scale"]])
               if (name, seed) not in done]  # fmt: skip
    if missing:
        yield f"Not run yet: {'; '.join(missing)}."
    yield "No task of lm-eval was run: their data is not part of any package, and nothing is downloaded but the model."


def _kept_apart(results: Results, mark: Marks, made: Record) -> Iterator[str]:
    held = [
        f"{TEXTS[text]} ({mark(f'held_out.{text}.tokens', ',.0f')} tokens of "
        f"{mark(f'held_out.{text}.documents', '.0f')} documents, "
        f"sha256 `{results.arms()['teacher', 0][text]['sha256'][:16]}`)"
        for text in TEXTS
    ]
    yield (
        f"Reported on: {'; '.join(held)}. Documentation is docstrings of numpy and of packages of Python that a hash "
        "of their names holds out; stories are the places and messages of the game Colossal Cave (PyPI's "
        "`adventure`), in sentence case; headers are those of torch."
    )
    yield (
        "- Sides are decided by the name of a package before anything is trained (`benchmarks/real/text_files.py`).\n"
        "- Rates, the best checkpoint of a run and the recipe are chosen on dev text: docstrings of networkx and of "
        "further packages of Python. Trials and runs are given no other held-out file.\n"
        "- The files that are reported on are written and opened by the judge, after training; each result has the "
        "hash of the files it was judged on, and results of different files are not put into one table.\n"
        f"- Of the prompts, {mark('text.prompts_seen', '.0f')} stand word for word in the text that was trained on."
    )


def _method(results: Results, mark: Marks, made: Record) -> Iterator[str]:
    yield (
        "```bash\nmake flagship            # the night; after a stop, the same command continues\n"
        "make flagship SMALL=1    # twenty minutes, short arms, the same code\n```"
    )
    yield (
        f"Transfer text: {mark('text.tokens', ',.0f')} tokens, of which {mark('text.docs_tokens', ',.0f')} are pages "
        "of Python's reference and docstrings of its library; the rest the teacher wrote, with the questions: "
        f"{mark('text.chat.tokens', ',.0f')} tokens of answers to questions that it asked itself, and "
        f"{mark('text.plain.tokens', ',.0f')} that continue paragraphs of the documentation. Writing them took "
        f"{mark('text.write_cpu_hours', '.2f')} CPU hours, once for all arms, and is not in the arms' hours."
    )
    yield (
        f"Budget: {mark('plan.hours', '.1f')} hours with {mark('plan.workers', '.0f')} processes of one thread, shared "
        f"over the arms: {mark('plan.arm_cpu_hours', '.2f')} CPU hours for each. Counted are steps, asking the "
        "teacher, writing rollouts and choosing layers; not loading, evaluating and judging. The number of steps was "
        "planned from a timing of the same arm, so every learning-rate schedule is complete. A step has "
        f"{ROWS} rows of {LENGTH} tokens."
    )
    settings = ", ".join(f"`{name} = {json.dumps(value)}`" for name, value in ARMS["best"].settings.items())
    yield f"The best recipe sets {settings}."
    tried = {name: ", ".join(f"{rate:g}" for rate in sorted(results.tried(name))) for name in trials()}
    rates = [f"{_told(name)} {results.chosen_rate(name):g} of {told}" for name, told in tried.items() if told]
    if rates:
        yield f"Learning rates by short trials on dev text: {'; '.join(rates)}. A trial is shorter than an arm."
    machine = results.arms()["teacher", 0]["machine"]
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "transformers"))
    yield (
        f"{machine['processor']}, {machine['cores']} cores, {versions}, Python {machine['python']}. Drawn by "
        "`benchmarks/real/draw_real.py` from `benchmarks/real/results`."
    )


# -- plot ------------------------------------------------------------------------------------------------

COLORS = {
    "plain": "#e0862c", "kl": "#3b82d6", "best": "#2f9e5b", "rounds": "#9b6dd6", "cached": "#1fa3b0",
    "kl-written": "#b98a5e", "kl-docs": "#8a8f3c", "narrow-plain": "#e0862c", "narrow-kl": "#3b82d6",
}  # fmt: skip
INK = "#808890"  # readable on white and on black


def plot(results: Results, path: Path) -> bool:
    """Quality against CPU hours of every trained arm; False where matplotlib is not installed or nothing is there."""
    curves = {
        key: record for key, record in results.arms().items() if key[0] in COLORS and _cut_of(key[0]) in results.arms()
    }
    if not curves or importlib.util.find_spec("matplotlib") is None:
        return path.exists()
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "stillroom", "font.size": 9, "text.color": INK})
    from matplotlib import pyplot

    students = [one for one in (CUT, NARROW) if any(ARMS[name].student == one for name, _seed in curves)]
    figure, axes = pyplot.subplots(1, len(students), figsize=(4.4 * len(students) + 0.4, 3.6), squeeze=False)
    for axis, student in zip(axes[0], students, strict=True):
        lowest = 100.0
        for name, seed in curves:
            if ARMS[name].student != student:
                continue
            points = quality(results.arms(), name, seed)
            label = ARMS[name].label if seed == 0 else None
            axis.plot(*zip(*points, strict=True), color=COLORS[name], label=label, linewidth=1.6 if seed == 0 else 0.8)
            lowest = min(lowest, *(share for hours, share in points[1:]))
        axis.axhline(100, color=INK, linewidth=0.8, linestyle=":")
        axis.annotate("teacher", (0, 100), (3, -3), textcoords="offset points", va="top", fontsize=8, color=INK)
        axis.set_ylim(max(0.0, lowest - 3), 102)
        axis.set_xlim(left=0)
        axis.set_title(f"{student}", loc="left", fontsize=9, color=INK)
        axis.set_xlabel("CPU hours", color=INK)
        axis.tick_params(colors=INK)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(INK)
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    axes[0][0].set_ylabel("won back on dev text, %", color=INK)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    return True


def quality(arms: Arms, name: str, seed: int) -> list[tuple[float, float]]:
    """(CPU hours, share won back in %) at each evaluation of an arm, on dev text."""
    before, teacher = arms[_cut_of(name)]["dev_bits_per_byte"], arms["teacher", 0]["dev_bits_per_byte"]
    return [
        (point["cpu_seconds"] / 3600, 100 * (before - point["bits_per_byte"]) / (before - teacher))
        for point in arms[name, seed]["curve"]
    ]


if __name__ == "__main__":
    draw(Results(Path(__file__).with_name("results")), Path(__file__).parents[2] / "docs")
