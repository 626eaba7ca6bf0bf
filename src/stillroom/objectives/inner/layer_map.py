"""Which layer of the student answers for which layer of the teacher: whole numbers, decided before any model runs."""

from __future__ import annotations

from collections.abc import Sequence

from stillroom.config.objectives import LayerMap
from stillroom.errors import ConfigError

Pairs = tuple[tuple[int, int], ...]


def resolve_pairs(
    spec: LayerMap, num_student: int, num_teacher: int, *, where: str, kept: Sequence[int] | None = None
) -> Pairs:
    """Pairs (student's layer, teacher's layer), counted from 0.

    `proportional` puts the student's layers at equal steps and its last beside the teacher's last. A student that was
    cut from the teacher knows better: `kept` says which layer each of its own once was.
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
