"""Measures of a model beside its yardsticks: what it costs to keep and to run, and which questions it answers."""
