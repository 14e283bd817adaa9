"""The state of a partition in checkpoints: written beside the log, and read at a start."""
