"""Objectives for two models that read the same text in different tokens."""
