"""Keeps deltas: numbered, in causal order, until everyone who needs them has them. Knows only `wire`."""
