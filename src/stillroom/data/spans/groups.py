"""Groups of tokens of two vocabularies that say the same about how a text goes on.

Where both models stand at the same byte, a token of one is the beginning of tokens of the other, or begins with one.
A token and the first piece it is cut into by the other tokenizer are in one group, so a group of the teacher's tokens
and the group of the student's with the same number stand for the same continuations, and their masses can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stillroom.data.spans.pieces import Pieces, pieces_of


@dataclass(frozen=True)
class Groups:
    """The group of every id of both vocabularies. Every group has a token on each side."""

    student: tuple[int, ...]
    teacher: tuple[int, ...]
    num_groups: int


def token_groups(student: Any, teacher: Any) -> Groups:
    """Join each token with the first piece that the other tokenizer makes of it. Raise as `pieces_of` does."""
    if student.get_vocab() == teacher.get_vocab():
        everyone = tuple(range(max(student.get_vocab().values()) + 1))
        return Groups(everyone, everyone, len(everyone))
    of_student, of_teacher = pieces_of(student, teacher), pieces_of(teacher, student)
    num_student = len(of_student.tokens)
    links = [(own, num_student + cut[0]) for own, cut in enumerate(of_student.tokens) if cut]
    links += [(cut[0], num_student + own) for own, cut in enumerate(of_teacher.tokens) if cut]
    roots = _joined(links, num_student + len(of_teacher.tokens))
    return _numbered(roots, (of_student, of_teacher), int(student.eos_token_id or 0))


def _joined(links: list[tuple[int, int]], size: int) -> list[int]:
    """The root of every node after all links are made."""
    parents = list(range(size))

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for one, other in links:
        first, second = sorted((root(one), root(other)))
        parents[second] = first
    return [root(node) for node in range(size)]


def _numbered(roots: list[int], pieces: tuple[Pieces, Pieces], end_mark: int) -> Groups:
    """Groups from 0 on. Ids that nothing spells are one group, or join the end mark's where one side has none."""
    num_student = len(pieces[0].tokens)
    sides = roots[:num_student], roots[num_student:]
    shared = set(sides[0]) & set(sides[1])
    is_odd = [[one not in shared for one in side] for side in sides]
    numbers = {one: number for number, one in enumerate(sorted(shared))}
    rest = numbers.get(roots[end_mark], 0)
    if all(any(side) for side in is_odd):
        rest = len(numbers)
    student, teacher = (tuple(numbers.get(one, rest) for one in side) for side in sides)
    return Groups(student, teacher, max(*student, *teacher) + 1)
