"""delta-prop."""
