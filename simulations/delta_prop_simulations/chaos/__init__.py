"""Disasters: the real service under faults drawn from a seed, and the judge that looks at what it did."""
