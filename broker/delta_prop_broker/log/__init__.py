"""Logs: one contract, and what fulfils it."""
