"""What a run will take, before anything is loaded: bytes by part, what makes it fit, and what it costs."""
