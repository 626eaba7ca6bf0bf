"""Load models and tokenizers from folders, hub ids, builtin names and objects, and test them before use."""
