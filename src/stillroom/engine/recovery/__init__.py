"""Recovery from bad steps: examine, skip, roll back, quarantine."""
