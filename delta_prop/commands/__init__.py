"""The verbs of the command line, for a data directory or a server; one module per group of verbs."""
