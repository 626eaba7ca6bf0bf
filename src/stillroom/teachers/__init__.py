"""Where the teacher's answers come from."""

from stillroom.teachers.base import NO_TEACHER, SignalKind, Teacher
from stillroom.teachers.faulty import FaultyTeacher
from stillroom.teachers.gates import GateOptions, merge_gates
from stillroom.teachers.live import LiveTeacher
from stillroom.teachers.make import make_teacher
from stillroom.teachers.router import RouterTeacher
from stillroom.teachers.router_probe import probe_gates
from stillroom.teachers.router_run import Surroundings

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
