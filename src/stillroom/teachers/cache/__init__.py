"""A teacher's answers on disk: asked once, used as often as wanted."""

from stillroom.teachers.cache.reader import Cache

__all__ = ["Cache"]
