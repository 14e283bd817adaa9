"""The reading half of the data source: offset ranges of a service or of segment files, as columns."""
