"""Distributions of the shipped sinks' service times on this machine; predictions and measurements."""
