"""A mixture-of-experts teacher whose gates are told or trained."""
