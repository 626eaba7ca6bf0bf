"""Build a run, train it step by step, recover from faults, and write its results."""
