"""The demo: searches the standard library while you edit it. The service does not depend on it."""
