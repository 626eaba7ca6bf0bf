"""Measure what a GPU or CPU makes of a distillation, and compare it with predictions that were written down before."""
