"""Chaos runs: the real service under faults drawn from a seed, and the oracle that checks them."""
