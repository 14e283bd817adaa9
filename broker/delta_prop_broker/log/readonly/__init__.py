"""Read-only access to a log's directory, beside the process that writes it."""
