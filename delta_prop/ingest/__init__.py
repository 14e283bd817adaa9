"""Ingest: a bounded queue, write permissions, and deduplication. Decides only; never waits."""
