"""The data source on Spark: reads offset ranges as columns, and writes rows from within tasks."""
