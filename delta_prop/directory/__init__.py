"""A data directory from outside: its log read beside the service, and requests of operators."""
