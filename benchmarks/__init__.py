"""Benchmarks: each guards a number that the documentation states. Not in the wheel."""
