"""A teacher on a server: asked for log-probabilities of prompts, believed as far as its answers can be checked."""
