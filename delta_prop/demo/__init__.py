"""The demo: search the standard library while you edit it. Nothing of the service depends on it."""
