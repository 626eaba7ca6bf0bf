"""A run's folder: its lock, its description, and the inputs stored in it."""
