"""The names of `record` under their earlier address."""

from stillroom.telemetry.record import BASELINES, FINISHED, LoggedRun, RunReading, read_object
from stillroom.telemetry.record import section as mapping

__all__ = ["BASELINES", "FINISHED", "LoggedRun", "RunReading", "mapping", "read_object"]
