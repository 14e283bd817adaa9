"""Scenarios of traffic, limits and sinks, run with the production code in virtual time."""
