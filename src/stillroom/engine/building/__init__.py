"""Build a run from a configuration, up to its first step."""
