"""Causal order: decides which deltas to append now, which to hold as pending, and which to refuse."""
