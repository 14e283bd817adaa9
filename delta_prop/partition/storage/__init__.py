"""The work for a log on disk beside the appends: commits, recovery, compaction, checkpoints in time."""
