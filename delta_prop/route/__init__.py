"""From the log to the sinks: routing (`routing_table.py`) and delivery (`feed.py`)."""
