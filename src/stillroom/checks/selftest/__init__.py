"""The self-test: what is computed on this machine against float64, finite differences and the record of short runs."""
