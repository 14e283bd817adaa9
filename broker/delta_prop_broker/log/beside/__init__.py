"""Who looks at a log's directory without being the process that writes it."""
