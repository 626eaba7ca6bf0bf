"""Where the teacher's answers come from."""

from stillroom.teachers.gates import GateOptions, merge_gates
from stillroom.teachers.live import LiveTeacher, TeacherSource
from stillroom.teachers.router import RouterTeacher
from stillroom.teachers.router_probe import probe_gates

__all__ = ["GateOptions", "LiveTeacher", "RouterTeacher", "TeacherSource", "merge_gates", "probe_gates"]
