"""From the log to the sinks: who gets what (`table.py`), and how it reaches them (`feed.py`)."""
