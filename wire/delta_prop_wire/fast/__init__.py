"""The fast core: the same results as the general modules in fewer steps, or None for unusual work."""
