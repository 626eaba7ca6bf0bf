"""Objectives on hidden states and attention maps of paired layers."""
