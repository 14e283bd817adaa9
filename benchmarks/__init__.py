"""Benchmarks: each one checks numbers that the documentation has. They are not in the wheel."""
