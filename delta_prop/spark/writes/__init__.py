"""The writing half of the data source: rows as blocks, numbered or staged, sent from within a task."""
