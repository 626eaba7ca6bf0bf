"""What the router's runs say: a table for each regime and sentences that follow from the numbers by rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import book as books
from book import Book, Line

GUARDED = ("truth", "sar", "anti-sar", "sar as shipped", "sar-joint", "sar-meta")
UNGUARDED = ("sar unguarded", "sar-joint unguarded")
BOUND = 0.01  # nats by which a guarded mode may be worse than the frozen teacher, beyond the spread
COLLAPSE = 0.1  # nats of the teacher's own held-out loss


def chosen(book: Book, arm: str, regime: str) -> dict[int, Line]:
    """The reported runs of an arm by seed: those at the router's rate that was best on dev with the first seed."""
    found = [line for line in book.runs if line["arm"] == arm and line["regime"] == regime]
    first = [line for line in found if line["job"]["seed"] == 0]
    if not first:
        return {}
    rate = min(first, key=lambda line: line["dev"])["job"]["router_rate"]
    return {line["job"]["seed"]: line for line in found if line["job"]["router_rate"] == rate}


def losses(book: Book, arm: str, regime: str) -> dict[int, float]:
    return {seed: line["test"] for seed, line in chosen(book, arm, regime).items()}


def against(book: Book, arm: str, other: str, regime: str) -> list[float]:
    return books.paired(losses(book, arm, regime), losses(book, other, regime))


def draw(book: Book, labels: Mapping[str, str], arms: Sequence[str]) -> None:
    present = [regime for regime in labels if chosen(book, "frozen", regime)]
    parts = [
        "Student's held-out cross-entropy (test, nats a token), mean \u00b1 sd over seeds, and paired differences to "
        "the frozen teacher. The teacher's own loss on the same text before and after; how far it moved (KL from the "
        "original); CPU seconds of the whole training; how often the alarm took the gates back.",
        "## Verdicts",
        "\n".join(f"- {sentence}" for sentence in sentences(book, present)),
    ]
    for regime in present:
        parts += [f"## {regime}: {labels[regime]}", weights(book, regime)]
        parts.append(books.markdown(table(book, regime, ["plain", "frozen", *arms])))
    books.save_table(book, "Training the router of a mixture-of-experts teacher", parts)
    _figure(book, present, arms)


def weights(book: Book, regime: str) -> str:
    """The weight of distillation in this regime, and what it was chosen from."""
    used = next(iter(chosen(book, "frozen", regime).values()))["job"]["objectives"]["kd.weight"]
    tried = [line for line in book.runs if line["arm"] == "weight" and line["regime"] == regime]
    told = ", ".join(f"{line['weight']:g}: {line['dev']:.3f}" for line in tried)
    return f"Weight of distillation {used:g}" + (f", chosen on dev ({told})." if told else ", by design.")


def table(book: Book, regime: str, arms: Sequence[str]) -> list[list[str]]:
    rows = [["arm", "student", "against frozen", "teacher", "moved", "KL to teacher", "rate", "CPU s", "taken back"]]
    for arm in arms:
        lines = list(chosen(book, arm, regime).values())
        if not lines:
            continue
        has_teacher = "teacher_after" in lines[0]
        rate = lines[0]["job"]["router_rate"]
        rows.append(
            [
                arm,
                books.told(line["test"] for line in lines),
                books.told(against(book, arm, "frozen", regime), 4, is_signed=True) if arm != "frozen" else "",
                f"{_mean(lines, 'teacher_before'):.3f} -> {_mean(lines, 'teacher_after'):.3f}" if has_teacher else "",
                f"{_mean(lines, 'teacher_moved'):.3f}" if has_teacher else "",
                f"{_mean(lines, 'kl'):.3f}",
                f"{rate:g}" if rate else "",
                f"{_mean(lines, 'cpu_seconds'):.0f}",
                f"{sum(line['is_taken_back'] for line in lines)} of {len(lines)}" if rate and has_teacher else "",
            ]
        )
    start = [line["start"] for line in chosen(book, "frozen", regime).values()]
    rows.append(["(student before)", books.told(start), *[""] * 7])
    return rows


def _mean(lines: Sequence[Line], what: str) -> float:
    return books.mean(line[what] for line in lines)


def sentences(book: Book, regimes: Sequence[str]) -> list[str]:
    return [_guarded(book, regimes), *_collapse(book, regimes), *_truth(book, regimes), *_student(book, regimes)]


def _guarded(book: Book, regimes: Sequence[str]) -> str:
    """Guarded modes are never worse than frozen by more than the bound beyond the spread."""
    broken = []
    for regime in regimes:
        for arm in GUARDED:
            found = against(book, arm, "frozen", regime)
            if found and books.mean(found) - books.spread(found) > BOUND:
                broken.append(f"{arm} in {regime} ({books.told(found, 4, is_signed=True)})")
    if broken:
        return f"Guarded modes are NOT always within {BOUND:g} nats of the frozen teacher: {'; '.join(broken)}."
    return f"No guarded mode was worse than the frozen teacher by more than {BOUND:g} nats beyond the spread."


def _collapse(book: Book, regimes: Sequence[str]) -> list[str]:
    said = []
    for regime in regimes:
        for arm in UNGUARDED:
            lines = list(chosen(book, arm, regime).values())
            if lines:
                change = _mean(lines, "teacher_after") - _mean(lines, "teacher_before")
                word = "collapsed" if change > COLLAPSE else "did not collapse"
                paid = books.told(against(book, arm, "frozen", regime), is_signed=True)
                said.append(f"{regime}: {arm}, the teacher {word} ({change:+.3f} nats), the student paid {paid}.")
    return said


def _truth(book: Book, regimes: Sequence[str]) -> list[str]:
    said = []
    for regime in regimes:
        found = against(book, "truth", "frozen", regime)
        if found:
            side = (
                "helped" if books.is_beyond(found, -1) else "hurt" if books.is_beyond(found, +1) else "changed nothing"
            )
            told = books.told(found, 4, is_signed=True)
            said.append(f"{regime}: gates tuned on the labels {side} against the frozen teacher ({told}).")
    return said


def _student(book: Book, regimes: Sequence[str]) -> list[str]:
    """Student-awareness is claimed only where it beats the same training without it and with its sign turned."""
    said = []
    for regime in regimes:
        for arm, controls in (("sar", ("truth", "anti-sar")), ("sar-transient", ("frozen", "anti-transient"))):
            pairs = [against(book, arm, control, regime) for control in controls]
            if all(pairs):
                wins = [books.is_beyond(found, -1) for found in pairs]
                word = "beat both controls" if all(wins) else "did not beat both controls"
                told = ", ".join(
                    f"{books.told(found, 4, is_signed=True)} to {control}"
                    for control, found in zip(controls, pairs, strict=True)
                )
                said.append(f"{regime}: {arm} {word} ({told}).")
    return said


def _figure(book: Book, regimes: Sequence[str], arms: Sequence[str]) -> None:
    shown = [arm for arm in arms if arm not in UNGUARDED]
    columns = max((len(regimes) + 1) // 2, 2)
    figure, panels = books.axes(width=3.0 * columns, height=0.5 * len(shown) + 2.4, columns=columns, rows=2)
    for panel in panels[len(regimes) :]:
        panel.set_visible(False)
    for number, (panel, regime) in enumerate(zip(panels, regimes, strict=False)):
        for place, arm in enumerate(reversed(shown)):
            found = against(book, arm, "frozen", regime)
            if found:
                panel.errorbar(
                    books.mean(found), place, xerr=books.spread(found), fmt="o", capsize=3, color=books.COLOURS[0]
                )
        panel.axvline(0.0, color="#888888", lw=1)
        panel.set_title(regime, fontsize=10)
        panel.set_ylim(-0.5, len(shown) - 0.5)
        panel.set_yticks(range(len(shown)), list(reversed(shown)) if number % columns == 0 else [""] * len(shown))
        panel.set_xlabel("nats against frozen", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.locator_params(axis="x", nbins=4)
    figure.subplots_adjust(hspace=0.35)
    books.save_figure(book, figure)
