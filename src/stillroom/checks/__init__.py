"""Checks of an installation, a configuration and its resumption: `selftest`, `doctor`, `verify-resume`."""
