"""The public address of `Guard`, which judges the steps of any training loop."""

from stillroom.training.guard import Guard

__all__ = ["Guard"]
