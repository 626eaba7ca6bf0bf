"""Take the figures of README and docs from result files.

    python scripts/figures.py --check    # exit code 1, and a line for each figure that its result file does not give
    python scripts/figures.py --write    # write what the result files give

A figure stands between two comments, which no reader sees, `<!--f1-->63.3<!--/-->`. A comment at the end of the page
says for each where it is from: the result file, and below it the fields.

    <!-- figures
    benchmarks/demo/results/seeds.json
      f1 = mean runs[*].student.perplexity
    -->

Several files are joined by "+": lists of the same name follow each other. A field is a path into the JSON file, with
an optional function before it:

    rows["stillroom"].speed_against_trl      a value
    mean runs[*].student.perplexity          of all entries of a list, or of those with [arm=kd; size=20480]
    A - B, A / B, 100 * A                    from left to right

A value is written with as many decimals as the figure that stands there, and with commas where it has some.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FUNCTIONS: dict[str, Callable[[list[Any]], float]] = {
    "mean": statistics.fmean, "median": statistics.median, "max": max, "min": min, "sum": sum, "count": len,
}  # fmt: skip
MARKED = re.compile(r"<!--(?P<name>f\d+)-->(?P<text>.*?)<!--/-->")
SOURCES = re.compile(r"^<!-- figures\n(.*?)^-->", re.MULTILINE | re.DOTALL)
_PART = re.compile(r'\.?(?P<name>[A-Za-z_]\w*)|\["(?P<key>[^"]+)"\]|\[(?P<index>-?\d+)\]|\[(?P<every>[^\]"]+)\]')
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def pages(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def without_marks(text: str) -> str:
    """A page as its readers see it."""
    return SOURCES.sub("", MARKED.sub(lambda mark: mark["text"], text))


def sources(text: str) -> dict[str, tuple[str, str]]:
    """(files, field) of each name. Raises for a name that is given twice."""
    given: dict[str, tuple[str, str]] = {}
    block, files = SOURCES.search(text), ""
    for line in block[1].splitlines() if block else []:
        name, is_field, field = line.strip().partition(" = ")
        if not is_field:
            files = line.strip()
        elif name in given:
            raise ValueError(f"{name} has two sources")
        else:
            given[name] = files, field
    return given


# ---- Fields


def select(value: Any, condition: str) -> list[Any]:
    """The entries of a list or table for which every `key=value` holds; all of them for *."""
    entries = list(value.values()) if isinstance(value, dict) else value
    if condition == "*":
        return list(entries)
    wanted = [pair.split("=", 1) for pair in condition.split("; ")]
    return [one for one in entries if all(_shown(_at(one, key)) == text for key, text in wanted)]


def _at(value: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def values(table: Any, path: str) -> list[Any]:
    """What a path leads to: one value, or one for each entry that it passes through."""
    reached, place = [table], 0
    while place < len(path):
        part = _PART.match(path, place)
        if part is None:
            raise ValueError(f"{path!r} is not a path: {path[place:]!r}")
        place = part.end()
        if part["every"]:
            reached = [one for value in reached for one in select(value, part["every"])]
        elif part["index"]:
            reached = [value[int(part["index"])] for value in reached]
        else:
            reached = [value[part["name"] or part["key"]] for value in reached]
    return reached


def _term(table: Any, text: str) -> float:
    word, _, rest = text.strip().partition(" ")
    if word in FUNCTIONS:
        return float(FUNCTIONS[word](values(table, rest.strip())))
    if re.fullmatch(r"-?[\d.e-]+", text.strip()):
        return float(text)
    reached = values(table, text.strip())
    if len(reached) != 1:
        raise ValueError(f"{text!r} leads to {len(reached)} values: put mean, max or another function before it")
    return float(reached[0])


def _terms(field: str) -> list[str]:
    """Terms and the operators between them; a sign inside of brackets is part of a name."""
    terms = [""]
    for place, piece in enumerate(re.split(r"(\[[^\]]*\])", field)):
        if place % 2:
            terms[-1] += piece
        else:
            first, *others = re.split(r" ([-+*/]) ", piece)
            terms[-1] += first
            terms += others
    return terms


def evaluate(table: Any, field: str) -> float:
    """The value of a field, operators from left to right."""
    first, *others = _terms(field)
    value = _term(table, first)
    for sign, text in zip(others[::2], others[1::2], strict=True):
        other = _term(table, text)
        match sign:
            case "+":
                value += other
            case "-":
                value -= other
            case "*":
                value *= other
            case _:
                value /= other
    return value


# ---- Figures


def agrees(figure: str, value: float) -> bool:
    """Whether a value rounds to the figure as it is written."""
    number = _NUMBER.search(figure)
    if number is None:
        return False
    text = number[0].replace(",", "")
    decimals = len(text.partition("e")[0].partition(".")[2]) - int(text.partition("e")[2] or 0)
    return abs(float(text) - value) <= 0.5 * 10.0**-decimals * (1 + 1e-9) + 1e-12


def written_like(figure: str, value: float) -> str:
    """The value with the decimals, the commas and the words of the figure that stood there."""
    number = _NUMBER.search(figure)
    if number is None:
        raise ValueError(f"{figure!r} has no number")
    mantissa, _, exponent = number[0].partition("e")
    decimals = len(mantissa.partition(".")[2])
    if exponent:
        mantissa, _, exponent = f"{value:.{decimals}e}".partition("e")
        new = f"{mantissa}e{int(exponent)}"
    else:
        new = f"{value:{',' if ',' in mantissa or abs(value) >= 10_000 else ''}.{decimals}f}"
    return figure[: number.start()] + new + figure[number.end() :]


def _table(files: str, root: Path) -> Any:
    """Several files as one: lists of the same name follow each other, of other values the first counts."""
    first, *others = (json.loads((root / name).read_text(encoding="utf-8")) for name in files.split(" + "))
    for other in others:
        for key, value in other.items():
            first[key] = first[key] + value if isinstance(first.get(key), list) else first.get(key, value)
    return first


def checked(text: str, root: Path = ROOT) -> tuple[str, list[str]]:
    """The page with what the result files give, and a line for each figure that was another or has no source."""
    given, used, wrong = sources(text), [], []
    tables: dict[str, Any] = {}

    def replace(mark: re.Match[str]) -> str:
        used.append(mark["name"])
        try:
            files, field = given[mark["name"]]
            tables[files] = tables.get(files) or _table(files, root)
            value = evaluate(tables[files], field)
            if agrees(mark["text"], value):
                return mark[0]
            new = written_like(mark["text"], value)
        except (OSError, LookupError, TypeError, ArithmeticError, ValueError) as error:
            wrong.append(f"{mark[0]}: {type(error).__name__}: {error}")
            return mark[0]
        wrong.append(f"{mark[0]}: {field} is {new}")
        return f"<!--{mark['name']}-->{new}<!--/-->"

    text = MARKED.sub(replace, text)
    wrong += [f"{name} is used twice" for name in given if used.count(name) > 1]
    wrong += [f"{name} has a source and stands nowhere" for name in given if name not in used]
    if text.count("<!--/-->") != len(used):
        wrong.append("a mark is not closed, or of no figure")
    return text, wrong


def main(arguments: list[str]) -> int:
    if arguments not in (["--check"], ["--write"]):
        print(__doc__)
        return 2
    num_wrong = num_figures = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new, wrong = checked(text)
        if arguments == ["--write"] and new != text:
            page.write_text(new, encoding="utf-8")
            for line in wrong:
                print(f"{page.relative_to(ROOT)}: {line}")
            new, wrong = checked(new)  # what writing could not repair
        for line in wrong:
            print(f"{page.relative_to(ROOT)}: {line}")
        num_wrong += len(wrong)
        num_figures += len(MARKED.findall(new))
    print(f"{num_figures} figures, {num_wrong} that do not hold")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
