"""The catalogue of a data directory: its streams, their partitions and their settings."""
