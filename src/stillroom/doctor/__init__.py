"""Examine a run before, while and after it trains."""
