"""Lets Spark find `format("delta_prop")`: it imports the modules pyspark_* and reads `DefaultSource`."""

from delta_prop.spark.data_source.source import DeltaPropSource as DefaultSource

__all__ = ["DefaultSource"]
