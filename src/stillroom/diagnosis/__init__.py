"""Read what a run left behind and name what went wrong, with the steps, the numbers and a setting to change.

Imports no torch: a diagnosis reads JSON.
"""

from stillroom.diagnosis.case import Case
from stillroom.diagnosis.finding import Finding
from stillroom.diagnosis.order import diagnose, roots

__all__ = ["Case", "Finding", "diagnose", "roots"]
