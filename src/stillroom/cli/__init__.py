"""The command line. Each command imports what it needs: `--help` loads no torch."""

from stillroom.cli import train as train  # importing a module adds its commands; the order is that of the help

# isort: split
from stillroom.cli import chat as chat
from stillroom.cli import inspect as inspect
from stillroom.cli import quantise as quantise
from stillroom.cli import tools as tools
from stillroom.cli.exit import main
from stillroom.cli.main import app

__all__ = ["app", "main"]
