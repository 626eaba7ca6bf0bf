"""The names of `record` under their earlier address."""

from stillroom.telemetry.record import (
    EVALUATED,
    Evaluated,
    evaluation_notes,
    read_evaluation,
    student_sum,
    write_evaluation,
)

__all__ = ["EVALUATED", "Evaluated", "evaluation_notes", "read_evaluation", "student_sum", "write_evaluation"]
