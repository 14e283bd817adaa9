"""Logs: one contract and its implementations."""
