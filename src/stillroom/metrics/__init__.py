"""Metrics of a model: perplexity and agreement, what it costs to keep and to run, and which questions it answers."""
