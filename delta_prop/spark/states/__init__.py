"""The state of every vector: deltas folded by buckets, and what a sink holds, to compare it with."""
