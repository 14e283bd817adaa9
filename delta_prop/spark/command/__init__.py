"""`delta-prop spark …`: arguments, checks, runs, output."""
