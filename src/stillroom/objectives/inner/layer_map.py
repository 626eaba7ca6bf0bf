"""Pair layers of the student with layers of the teacher."""

from __future__ import annotations

from collections.abc import Sequence

from stillroom.config.objectives import LayerMap
from stillroom.errors import ConfigError

Pairs = tuple[tuple[int, int], ...]


def resolve_pairs(
    spec: LayerMap, num_student: int, num_teacher: int, *, where: str, kept: Sequence[int] | None = None
) -> Pairs:
    """Pairs (student's layer, teacher's layer), counted from 0.

    `proportional` spaces the student's layers evenly over the teacher's, the last beside the last. For a student cut
    from the teacher, `kept` gives the teacher's layer that each of its layers was.
    """
    if spec == "last":
        return ((num_student - 1, num_teacher - 1),)
    if spec == "proportional":
        if kept is not None:
            return tuple(enumerate(kept))
        return tuple((i, -(-(i + 1) * num_teacher // num_student) - 1) for i in range(num_student))
    if not spec:
        raise ConfigError("the map holds no pair of layers", where=where, advice=[f'set {where} = "proportional"'])
    return tuple(
        (_place(student, num_student, "student", where), _place(teacher, num_teacher, "teacher", where))
        for student, teacher in spec
    )


def _place(layer: int, number: int, role: str, where: str) -> int:
    if not -number <= layer < number:
        raise ConfigError(
            f"the {role} has {number} layers, 0 to {number - 1}, and no layer {layer}",
            where=where,
            advice=[
                f"choose from 0 to {number - 1}, or count from the end with -1",
                f'or set {where} = "proportional"',
            ],
        )
    return layer % number
