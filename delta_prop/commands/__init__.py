"""The command line verbs that work on a data directory or ask a server, one module per group of verbs."""
