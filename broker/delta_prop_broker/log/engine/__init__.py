"""The parts of the log on disk, which `durable.py` puts together."""
