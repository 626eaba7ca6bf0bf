"""Teachers: what a run asks of them, and the kinds there are."""

from stillroom.teachers.base import NO_TEACHER, RunContext, SignalKind, Teacher, TeacherTraining
from stillroom.teachers.live import LiveTeacher
from stillroom.teachers.router.gates import GateOptions, merge_gates
from stillroom.teachers.router.teacher import RouterTeacher, probe_gates

__all__ = [
    "NO_TEACHER",
    "GateOptions",
    "LiveTeacher",
    "RouterTeacher",
    "RunContext",
    "SignalKind",
    "Teacher",
    "TeacherTraining",
    "merge_gates",
    "probe_gates",
]
