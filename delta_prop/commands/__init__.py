"""The verbs of the command that work on a data directory, one module a group of verbs."""
