"""Checks of an installation and of resuming: `selftest`, `verify-resume`."""
