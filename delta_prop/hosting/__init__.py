"""Many partitions in one process: the streams of a data directory."""
