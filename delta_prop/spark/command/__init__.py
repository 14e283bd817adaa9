"""`delta-prop spark …`: the arguments, the runs, and what they print."""
