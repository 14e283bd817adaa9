"""Jobs on Spark that emit deltas and read them; the only place that knows Spark."""
