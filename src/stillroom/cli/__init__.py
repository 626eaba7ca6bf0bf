"""The command line. Nothing heavy is imported before a command needs it: `--help` loads no torch."""

from stillroom.cli import runs as runs  # a module adds its commands when it is imported, in the order of the help

# isort: split
from stillroom.cli import cache as cache
from stillroom.cli import views as views
from stillroom.cli.app import app
from stillroom.cli.ends import main

__all__ = ["app", "main"]
