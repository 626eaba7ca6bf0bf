"""Tasks whose answers can be checked, one token a letter.

A task has prompts that no two parts share, a right answer to each, the same with random missteps after which it is
continued as well as can be, and a check. The maze forgives a misstep, sorting does not.
"""

from __future__ import annotations

import json
import random
from collections import deque
from pathlib import Path
from typing import Any, Protocol

PROMPTS = {"train": 128, "dev": 150, "test": 300}
COLON = "~"
LETTERS = [chr(0x21 + number) for number in range(81)]  # printable ASCII from '!'


class Task(Protocol):
    name: str
    most: int  # tokens of an answer
    schooling: float  # missteps in the text that a teacher is schooled on
    parts: dict[str, list[Any]]

    def prompt(self, item: Any) -> str: ...

    def answer(self, item: Any, rng: random.Random, missteps: float = 0.0) -> str | None:
        """A right answer, where each step is a random one with the probability `missteps`; None: it does not end."""

    def is_right(self, item: Any, answer: str) -> bool: ...


def _parts(items: list[Any], seed: int) -> dict[str, list[Any]]:
    """Disjoint parts; `all` is everything but dev and test."""
    random.Random(seed).shuffle(items)
    parts = {}
    for name, count in PROMPTS.items():
        parts[name], items = items[:count], items[count:]
    return parts | {"all": [*parts["train"], *items]}


class Maze:
    """A path through a maze of 9 x 9 cells, from any of them to one of 12 goals.

    Right: each step goes to an open neighbour, the last cell is the goal, and the text ends there.
    """

    name, most, schooling = "maze", 40, 0.15
    size = 9

    def __init__(self, seed: int = 0) -> None:
        self.ways = self._open(seed)
        self.steps = {goal: self._distances(goal) for goal in self.ways}
        goals = random.Random(seed).sample(sorted(self.ways), 12)
        pairs = [(start, goal) for start in self.ways for goal in goals]
        self.parts = _parts([one for one in pairs if 4 <= self.steps[one[1]][one[0]] <= self.most // 2], seed + 1)

    def _open(self, seed: int) -> dict[int, list[int]]:
        """A random spanning tree of the grid, with some more openings: most cells have several ways to the goal."""
        rng, size = random.Random(seed), self.size
        near = {
            cell: [
                other
                for other in (cell - size, cell + size, cell - 1, cell + 1)
                if 0 <= other < size * size and abs(other % size - cell % size) <= 1
            ]
            for cell in range(size * size)
        }
        open_to: dict[int, set[int]] = {cell: set() for cell in near}

        def join(cell: int, other: int) -> None:
            open_to[cell].add(other)
            open_to[other].add(cell)

        seen, stack = {0}, [0]
        while stack:
            free = [other for other in near[stack[-1]] if other not in seen]
            if not free:
                stack.pop()
                continue
            other = rng.choice(free)
            join(stack[-1], other)
            seen.add(other)
            stack.append(other)
        for cell, others in near.items():
            for other in others:
                if rng.random() < 0.12:
                    join(cell, other)
        return {cell: sorted(others) for cell, others in open_to.items()}

    def _distances(self, goal: int) -> dict[int, int]:
        found, queue = {goal: 0}, deque([goal])
        while queue:
            cell = queue.popleft()
            for other in self.ways[cell]:
                if other not in found:
                    found[other] = found[cell] + 1
                    queue.append(other)
        return found

    def prompt(self, item: tuple[int, int]) -> str:
        return LETTERS[item[0]] + LETTERS[item[1]] + COLON

    def answer(self, item: tuple[int, int], rng: random.Random, missteps: float = 0.0) -> str | None:
        (cell, goal), path, steps = item, "", self.steps[item[1]]
        while cell != goal and len(path) < self.most:
            better = [other for other in self.ways[cell] if steps[other] < steps[cell]]
            cell = rng.choice(self.ways[cell]) if rng.random() < missteps else better[0]
            path += LETTERS[cell]
        return path if cell == goal else None

    def is_right(self, item: tuple[int, int], answer: str) -> bool:
        cell, goal = item
        for letter in answer:
            if letter not in LETTERS or LETTERS.index(letter) not in self.ways[cell]:
                return False
            cell = LETTERS.index(letter)
        return bool(answer) and len(answer) <= self.most and cell == goal


class Sort:
    """Eight letters in order. A misstep takes any of the letters that are left; nothing makes up for it."""

    name, most, schooling = "sort", 8, 0.03

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        found = {"".join(rng.choices(LETTERS[:16], k=self.most)) for _ in range(6000)}
        self.parts = _parts(sorted(found), seed + 1)

    def prompt(self, item: str) -> str:
        return item + COLON

    def answer(self, item: str, rng: random.Random, missteps: float = 0.0) -> str:
        left, text = sorted(item), ""
        while left:
            text += left.pop(rng.randrange(len(left)) if rng.random() < missteps else 0)
        return text

    def is_right(self, item: str, answer: str) -> bool:
        return answer == "".join(sorted(item))


def write(file: Path, rows: list[tuple[str, str]]) -> Path:
    """Prompts and answers as JSON lines."""
    file.write_text("".join(json.dumps({"prompt": one, "completion": other}) + "\n" for one, other in rows))
    return file
