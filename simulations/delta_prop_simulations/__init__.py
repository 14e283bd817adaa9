"""Simulation: the production service in a simulated world. Production code never imports it."""
