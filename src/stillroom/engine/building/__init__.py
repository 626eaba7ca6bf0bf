"""From a configuration to a run that may take its first step."""
