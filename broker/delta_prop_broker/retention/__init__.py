"""Retention of a log: holders, removal, compaction into snapshots, compression."""
