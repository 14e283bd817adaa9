"""What Spark looks for to know `format("delta_prop")` without being told of it."""

from delta_prop.spark.source import DeltaPropSource as DefaultSource

__all__ = ["DefaultSource"]
