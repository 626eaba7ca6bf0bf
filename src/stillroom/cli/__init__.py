"""The command line. Each command imports what it needs: `--help` loads no torch."""

from stillroom.cli import runs as runs  # importing a module adds its commands; the order is that of the help

# isort: split
from stillroom.cli import after as after
from stillroom.cli import cache as cache
from stillroom.cli import checks as checks
from stillroom.cli import evaluate as evaluate
from stillroom.cli import keep as keep
from stillroom.cli import plan as plan
from stillroom.cli import views as views
from stillroom.cli import watch as watch
from stillroom.cli import write as write
from stillroom.cli.app import app
from stillroom.cli.ends import main

__all__ = ["app", "main"]
