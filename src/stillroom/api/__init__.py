"""The functions of the package for Python programs. See docs/api.md."""
