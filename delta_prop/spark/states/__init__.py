"""Folds deltas to the state of every vector, by buckets, and compares it with a sink's contents."""
