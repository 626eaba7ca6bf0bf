"""The names of `record` under their earlier address."""

from stillroom.telemetry.record import Fields, Format, items, reading, section, show, show_interval

__all__ = ["Fields", "Format", "items", "reading", "section", "show", "show_interval"]
