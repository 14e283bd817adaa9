"""delta-prop for another harness: a folder that the harness puts first on its path."""
