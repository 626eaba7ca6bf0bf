"""Teachers: what a run asks of them, and the kinds there are."""

from stillroom.teachers.base import NO_TEACHER, SignalKind, Teacher
from stillroom.teachers.faulty import FaultyTeacher
from stillroom.teachers.live import LiveTeacher
from stillroom.teachers.make import make_teacher
from stillroom.teachers.router.gates import GateOptions, merge_gates
from stillroom.teachers.router.in_run import Surroundings
from stillroom.teachers.router.probe import probe_gates
from stillroom.teachers.router.teacher import RouterTeacher

__all__ = [
    "NO_TEACHER",
    "FaultyTeacher",
    "GateOptions",
    "LiveTeacher",
    "RouterTeacher",
    "SignalKind",
    "Surroundings",
    "Teacher",
    "make_teacher",
    "merge_gates",
    "probe_gates",
]
