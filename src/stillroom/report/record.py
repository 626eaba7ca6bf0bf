"""What the report reads of a run. The class is in telemetry, because the diagnosis reads the same below the engine."""

from stillroom.telemetry.run_record import BASELINES, FINISHED, RunRecord, mapping

__all__ = ["BASELINES", "FINISHED", "RunRecord", "mapping"]
