"""Judge a finished run and describe its result."""
