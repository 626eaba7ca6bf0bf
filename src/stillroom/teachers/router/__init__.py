"""A mixture-of-experts teacher whose gates choose other experts or are trained."""
