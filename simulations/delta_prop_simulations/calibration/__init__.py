"""Measures the service times of shipped sinks on this machine, and tests predictions made from them."""
