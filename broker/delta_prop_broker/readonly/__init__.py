"""Read-only access to the directory of a log, beside the process that writes it."""
