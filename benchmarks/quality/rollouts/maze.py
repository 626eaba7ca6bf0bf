"""The task: a path through a maze of 9 x 9 cells, one token a cell. Whether an answer is right can be checked.

A prompt is the start, the goal and a colon; the answer is the cells from the start to the goal. Right: each step goes
to an open neighbour, the last cell is the goal, the text ends there, and it took no more than `MOST` steps.
"""

from __future__ import annotations

import json
import random
from collections import deque
from pathlib import Path

SIZE, MOST = 9, 40
CELLS = [chr(0x21 + number) if number < 90 else "" for number in range(SIZE * SIZE)]  # printable ASCII from '!'
COLON = "~"
PROMPTS = {"train": 128, "dev": 150, "test": 300}


def maze(seed: int = 0) -> dict[int, list[int]]:
    """A random spanning tree of the grid, with some more openings: most cells have several ways to the goal."""
    rng = random.Random(seed)
    near = {
        cell: [
            other
            for other in (cell - SIZE, cell + SIZE, cell - 1, cell + 1)
            if 0 <= other < SIZE * SIZE and abs(other % SIZE - cell % SIZE) <= 1
        ]
        for cell in range(SIZE * SIZE)
    }
    open_to: dict[int, set[int]] = {cell: set() for cell in near}
    seen, stack = {0}, [0]
    while stack:
        cell = stack[-1]
        free = [other for other in near[cell] if other not in seen]
        if not free:
            stack.pop()
            continue
        other = rng.choice(free)
        open_to[cell].add(other)
        open_to[other].add(cell)
        seen.add(other)
        stack.append(other)
    for cell, others in near.items():
        for other in others:
            if rng.random() < 0.12:
                open_to[cell].add(other)
                open_to[other].add(cell)
    return {cell: sorted(others) for cell, others in open_to.items()}


class Task:
    """The maze, its shortest ways, and prompts that no two parts share."""

    def __init__(self, seed: int = 0) -> None:
        self.ways = maze(seed)
        self.steps = {goal: self._distances(goal) for goal in self.ways}
        pairs = [(start, goal) for start in self.ways for goal in self.ways if start != goal]
        pairs = [pair for pair in pairs if 4 <= self.steps[pair[1]][pair[0]] <= MOST // 2]
        random.Random(seed + 1).shuffle(pairs)
        self.parts: dict[str, list[tuple[int, int]]] = {}
        for name, count in PROMPTS.items():
            self.parts[name], pairs = pairs[:count], pairs[count:]
        self.others = pairs  # the teacher is schooled on these

    def _distances(self, goal: int) -> dict[int, int]:
        found, queue = {goal: 0}, deque([goal])
        while queue:
            cell = queue.popleft()
            for other in self.ways[cell]:
                if other not in found:
                    found[other] = found[cell] + 1
                    queue.append(other)
        return found

    def path(self, start: int, goal: int, rng: random.Random, missteps: float = 0.0) -> list[int]:
        """A shortest way, on which each step is a random one with the probability `missteps`."""
        cell, path, steps = start, [], self.steps[goal]
        while cell != goal and len(path) < MOST:
            better = [other for other in self.ways[cell] if steps[other] < steps[cell]]
            cell = rng.choice(self.ways[cell]) if rng.random() < missteps else better[0]
            path.append(cell)
        return path

    def is_right(self, start: int, goal: int, answer: str) -> bool:
        if not answer or len(answer) > MOST or answer[-1] != CELLS[goal]:
            return False
        cell = start
        for letter in answer:
            if letter not in CELLS or CELLS.index(letter) not in self.ways[cell]:
                return False
            cell = CELLS.index(letter)
        return True


def prompt(start: int, goal: int) -> str:
    return CELLS[start] + CELLS[goal] + COLON


def text(path: list[int]) -> str:
    return "".join(CELLS[cell] for cell in path)


def write(file: Path, rows: list[tuple[str, str]]) -> Path:
    """Prompts and answers as JSON lines."""
    file.write_text("".join(json.dumps({"prompt": one, "completion": other}) + "\n" for one, other in rows))
    return file
