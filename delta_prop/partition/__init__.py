"""One partition: admission, order, append to the log, and acknowledgement, as plain calls."""
