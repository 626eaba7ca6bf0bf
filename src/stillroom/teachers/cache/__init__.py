"""A teacher's answers, cached on disk."""

from stillroom.teachers.cache.reader import Cache

__all__ = ["Cache"]
