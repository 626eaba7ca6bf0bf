"""Hold the figures of README and docs against the result files that docs/claims.md names.

python scripts/claims.py    # exit code 1, and a line for each claim that does not hold

A claim is a row of a table in docs/claims.md: the page, the words with the figure in bold, the result file (or several,
joined by " + "), the field, the script that made the file, the date. A field is a path into the JSON file, with an
optional function before it:

    rows["stillroom"].speed_against_trl      a value
    mean runs[*].student.perplexity          of all entries of a list, or of those with [arm=kd; size=20480]
    A - B, A / B, 100 * A                    from left to right
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "claims.md"
FUNCTIONS: dict[str, Callable[[list[Any]], float]] = {
    "mean": lambda values: statistics.fmean(values),
    "median": lambda values: statistics.median(values),
    "max": lambda values: max(values),
    "min": lambda values: min(values),
    "sum": lambda values: float(sum(values)),
    "count": lambda values: float(len(values)),
}
_PART = re.compile(r'\.?(?P<name>[A-Za-z_]\w*)|\["(?P<key>[^"]+)"\]|\[(?P<index>-?\d+)\]|\[(?P<every>[^\]"]+)\]')
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


@dataclass(frozen=True)
class Claim:
    page: str
    words: str  # as they stand on the page, with the figure in bold
    file: str
    field: str
    command: str
    date: str

    @property
    def figure(self) -> str:
        found = re.search(r"\*\*(.+?)\*\*", self.words)
        if found is None:
            raise ValueError(f"{self.page}: no figure in bold in {self.words!r}")
        return found[1]

    @property
    def plain_words(self) -> str:
        return self.words.replace("**", "")


def claims(page: Path = PAGE) -> list[Claim]:
    rows = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if len(cells) == 6 and cells[0] not in ("page", "") and not set(cells[0]) <= set("-:"):
            rows.append(Claim(*(cell.strip("`") if place != 1 else cell for place, cell in enumerate(cells))))
    return rows


# -- fields -----------------------------------------------------------------------------------------------


def select(value: Any, condition: str) -> list[Any]:
    """The entries of a list or table for which every `key=value` holds; all of them for *."""
    entries = list(value.values()) if isinstance(value, dict) else value
    if condition == "*":
        return list(entries)
    wanted = [pair.split("=", 1) for pair in condition.split("; ")]
    return [one for one in entries if all(shown(at(one, key)) == text for key, text in wanted)]


def at(value: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def values(table: Any, path: str) -> list[Any]:
    """What a path leads to: one value, or one for each entry that it passes through."""
    found, place = [table], 0
    while place < len(path):
        part = _PART.match(path, place)
        if part is None:
            raise ValueError(f"{path!r} is not a path: {path[place:]!r}")
        place = part.end()
        if part["every"]:
            found = [one for value in found for one in select(value, part["every"])]
        elif part["index"]:
            found = [value[int(part["index"])] for value in found]
        else:
            found = [value[part["name"] or part["key"]] for value in found]
    return found


def term(table: Any, text: str) -> float:
    word, _, rest = text.strip().partition(" ")
    if word in FUNCTIONS:
        return float(FUNCTIONS[word](values(table, rest.strip())))
    if re.fullmatch(r"-?[\d.e-]+", text.strip()):
        return float(text)
    found = values(table, text.strip())
    if len(found) != 1:
        raise ValueError(f"{text!r} leads to {len(found)} values: put mean, max or another function before it")
    return float(found[0])


def parts(field: str) -> list[str]:
    """Terms and the operators between them; a sign inside of brackets is part of a name."""
    found = [""]
    for place, piece in enumerate(re.split(r"(\[[^\]]*\])", field)):
        if place % 2:
            found[-1] += piece
        else:
            first, *others = re.split(r" ([-+*/]) ", piece)
            found[-1] += first
            found += others
    return found


def evaluate(table: Any, field: str) -> float:
    """The value of a field, operators from left to right."""
    first, *others = parts(field)
    value = term(table, first)
    for sign, text in zip(others[::2], others[1::2], strict=True):
        other = term(table, text)
        value = {"+": value + other, "-": value - other, "*": value * other, "/": value / other if other else 0.0}[sign]
    return value


# -- judging ----------------------------------------------------------------------------------------------


def agrees(figure: str, value: float) -> bool:
    """Whether a value rounds to the figure as it is written."""
    number = _NUMBER.search(figure)
    if number is None:
        return False
    text = number[0].replace(",", "")
    decimals = len(text.partition("e")[0].partition(".")[2]) - int(text.partition("e")[2] or 0)
    return abs(float(text) - value) <= 0.5 * 10.0**-decimals * (1 + 1e-9) + 1e-12


def flat(text: str) -> str:
    return " ".join(text.replace("**", "").split())


def merged(tables: list[Any]) -> Any:
    """Several files as one: lists of the same name follow each other, of other values the first counts."""
    first, *others = tables
    for other in others:
        for key, value in other.items():
            first[key] = first[key] + value if isinstance(first.get(key), list) else first.get(key, value)
    return first


def complaint(claim: Claim, root: Path = ROOT) -> str:
    """Why a claim does not hold; empty where it does."""
    page, script = root / claim.page, root / claim.command.split()[0]
    files = [root / name.strip("` ") for name in claim.file.split(" + ")]
    for path in (page, script, *files):
        if not path.is_file():
            return f"{path.relative_to(root)} does not exist"
    if flat(claim.plain_words) not in flat(page.read_text(encoding="utf-8")):
        return "these words are not on the page"
    if not re.fullmatch(r"20\d\d-\d\d-\d\d", claim.date):
        return f"{claim.date!r} is not a date"
    try:
        value = evaluate(merged([json.loads(path.read_text(encoding="utf-8")) for path in files]), claim.field)
    except (KeyError, IndexError, TypeError, ValueError, statistics.StatisticsError) as error:
        return f"{claim.field}: {type(error).__name__}: {error}"
    return "" if agrees(claim.figure, value) else f"{claim.figure} is said, and {claim.field} is {value:.6g}"


def main(rows: Iterable[Claim] | None = None) -> int:
    found = list(claims() if rows is None else rows)
    bad = [(claim, why) for claim in found if (why := complaint(claim))]
    for claim, why in bad:
        print(f"{claim.page}: {claim.words}: {why}")
    print(f"{len(found)} claims, {len(bad)} that do not hold")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
