"""Models and tokenizers from folders, hub ids, builtin names and objects, tried before they are used."""
