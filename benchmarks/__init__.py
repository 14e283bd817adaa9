"""Benchmarks: each one guards a number in the documentation. They are not in the wheel."""
