"""What the log on disk, `durable.py`, is made of."""
