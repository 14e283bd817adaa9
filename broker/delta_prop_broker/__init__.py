"""Stores deltas, numbered and in causal order, until nobody needs them any more. Imports only `wire`."""
