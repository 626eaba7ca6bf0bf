"""`python -m stillroom` is `stillroom`."""

from stillroom.cli import main

main()
