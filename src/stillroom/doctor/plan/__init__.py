"""Say what a run will take before anything is loaded: bytes by part, changes that make it fit, and its cost."""
