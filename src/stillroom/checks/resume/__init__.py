"""Proof that a run which is killed and resumed ends in the state of one that was not, to the last bit."""
