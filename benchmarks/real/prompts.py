"""Make 200 prompts with answers that can be checked, of the kinds of prompts.jsonl: `python prompts.py` writes them.

Each is continued as it stands. A prompt is of a kind, and right answers are single words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GIVEN, MADE = HERE / "prompts.jsonl", HERE / "more_prompts.jsonl"

CAPITALS = (
    "Germany Berlin, Spain Madrid, Portugal Lisbon, Greece Athens, Japan Tokyo, China Beijing, Russia Moscow, "
    "Egypt Cairo, Austria Vienna, Poland Warsaw, Ireland Dublin, Norway Oslo, Sweden Stockholm, Finland Helsinki, "
    "Hungary Budapest, Cuba Havana, Canada Ottawa, Peru Lima, Turkey Ankara, Kenya Nairobi, Iraq Baghdad, Iran Tehran, "
    "Thailand Bangkok, Belgium Brussels, Denmark Copenhagen"
)
OPPOSITES = (
    "big small|little, old new|young, fast slow, day night, left right, good bad|evil, black white, open closed|close, "
    "happy sad|unhappy, light dark|darkness|heavy, high low, strong weak, rich poor, wet dry, hard soft|easy, "
    "early late, long short, full empty, loud quiet|soft, true false, love hate, war peace, win lose, north south, "
    "inside outside"
)
PLURALS = (
    "cat cats, dog dogs, house houses, child children, man men, woman women, mouse mice, foot feet, tooth teeth, "
    "city cities, box boxes, knife knives, leaf leaves, goose geese, baby babies, book books, bus buses, wolf wolves, "
    "church churches, country countries"
)
PASTS = (
    "go went, eat ate, see saw, run ran, write wrote, take took, give gave, come came, make made, buy bought, "
    "think thought, sing sang, swim swam, begin began, know knew, fly flew, speak spoke, break broke, drink drank, "
    "find found"
)
COLORS = (
    "grass green, snow white, coal black, blood red, a banana yellow, a ripe tomato red, the sea blue, "
    "a carrot orange, milk white, a lemon yellow, the night sky black|dark|blue, chocolate brown"
)
SEQUENCES = (
    "Two, four, six, eight,=ten; Five, ten, fifteen,=twenty; Ten, nine, eight, seven,=six; 1, 2, 3, 4, 5,=6; "
    "2, 4, 6, 8,=10; 10, 20, 30, 40,=50; 5, 10, 15, 20,=25; 1, 3, 5, 7,=9; 100, 200, 300,=400; 9, 8, 7, 6,=5; "
    "January, February, March,=April; June, July, August,=September; September, October, November,=December; "
    "Thursday, Friday, Saturday,=Sunday; Friday, Saturday, Sunday,=Monday; a, b, c, d, e,=f; W, X, Y,=Z; "
    "first, second, third,=fourth; spring, summer, autumn,=winter; Mercury, Venus, Earth,=Mars; I, II, III,=IV; "
    "north, east, south,=west; morning, noon, afternoon,=evening|night; do, re, mi,=fa; 1, 10, 100,=1000"
)
FACTS = (
    "A square has four=sides|corners|equal|right; A week has seven=days; A day has twenty-four=hours; "
    "An hour has sixty=minutes; A minute has sixty=seconds; A spider has eight=legs; A bicycle has two=wheels; "
    "The Earth revolves around the=Sun; The planet that we live on is called=Earth; Bees make=honey; "
    "Cows give us=milk; Hens lay=eggs; A baby dog is called a=puppy; A baby cat is called a=kitten; "
    "The sun sets in the=west|evening; "
    "The sun is a=star; Ice is frozen=water; Hamlet was written by=Shakespeare; "
    "The theory of relativity was proposed by=Einstein; The chemical formula of water is=H2O; "
    "Paris is the capital of=France; Rome is the capital of=Italy; "
    "The currency of Japan is the=yen; The largest ocean on Earth is the=Pacific; The largest continent is=Asia; "
    "The first president of the United States was George=Washington; "
    "The Great Wall is in=China; "
    "The language spoken in Brazil is=Portuguese; The language spoken in France is=French; "
    "We see with our eyes and hear with our=ears; The heart pumps=blood; "
    "The freezing point of water is zero degrees=Celsius|C; An insect has six=legs; A dozen is=twelve|12"
)
CODE = (
    "In Python, a class is defined with the keyword=class; In Python, a value is returned with the keyword=return; "
    "In Python, True and False are values of the type=bool|boolean; In Python, len('abc') returns=3|three; "
    "In Python, 7 // 2 returns=3|three; In Python, 2 ** 3 returns=8|eight; In Python, a module is loaded with the "
    "keyword=import; In Python, an exception is raised with the keyword=raise; "
    "In Python, max([1, 5, 3]) returns=5|five; "
    "In Python, sum([1, 2, 3]) returns=6|six; In Python, 'abc'.upper() returns=ABC; "
    "In Python, [1, 2, 3][0] returns=1|one; "
    "def add(a, b):\n    return a +=b; if x > 0:\n    print('positive')\nelse:\n    print('=negative|zero|not; "
    "import numpy as=np; import pandas as=pd; while True:\n    if done:\n       =break|return; "
    "try:\n    work()\n=except|finally"
)


def prompts() -> list[dict[str, Any]]:
    """All prompts, with their kinds."""
    return [{"prompt": prompt, "answers": answers, "kind": kind} for kind, prompt, answers in _made()]


def _made() -> Iterator[tuple[str, str, list[str]]]:
    for name, answers in _pairs(CAPITALS):
        yield "capital", f"The capital of {name} is", answers
    for name, answers in _pairs(OPPOSITES):
        yield "opposite", f"The opposite of {name} is", answers
    for name, answers in _pairs(PLURALS):
        yield "plural", f"One {name}, two", answers
    for name, answers in _pairs(PASTS):
        yield "past tense", f"The past tense of {name} is", answers
    for name, answers in _pairs(COLORS):
        yield "color", f"The color of {name} is", answers
    for kind, table in (("sequence", SEQUENCES), ("fact", FACTS), ("code", CODE)):
        for entry in table.split("; "):
            prompt, _, words = entry.rpartition("=")
            yield kind, prompt, words.split("|")
    for first in range(2, 9):
        for second in (1, 3, 5):
            yield "sum", f"{first} + {second} =", [str(first + second)]


def _pairs(table: str) -> Iterator[tuple[str, list[str]]]:
    """Entries with a comma between them; the last word has the answers, with | between them."""
    for entry in table.split(", "):
        name, _, answers = entry.rpartition(" ")
        yield name, answers.split("|")


def is_right(text: str, answers: tuple[str, ...] | list[str]) -> bool:
    """Whether one of the answers, each a word, stands in the first line of a text."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    words = re.findall(r"\w+", first.lower())
    return any(answer.lower() in words for answer in answers)


def main() -> None:
    MADE.write_text("".join(json.dumps(one) + "\n" for one in prompts()), encoding="utf-8")


if __name__ == "__main__":
    main()
