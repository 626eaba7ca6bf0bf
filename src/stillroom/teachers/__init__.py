"""Where the teacher's answers come from."""

from stillroom.teachers.live import LiveTeacher, TeacherSource

__all__ = ["LiveTeacher", "TeacherSource"]
