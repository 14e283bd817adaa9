"""The writing half of the data source: sends rows as blocks, numbered or staged, from within a task."""
