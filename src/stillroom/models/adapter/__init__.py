"""A student trained by a low-rank adapter: which layers, attaching it, storing the base, merging it for others."""
