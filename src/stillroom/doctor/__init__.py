"""Checks of an installation, a configuration and its resumption."""
