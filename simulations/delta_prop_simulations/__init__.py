"""Simulation: the real service in a false world. Nothing in production imports it."""
