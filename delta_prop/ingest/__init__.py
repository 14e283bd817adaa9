"""Ingest: a bounded queue, origins, vector heads, and deduplication. It only decides, and never waits."""
