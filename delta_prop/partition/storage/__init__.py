"""What a log on disk needs beside the appends: commits, recovery, compaction, checkpoints in time."""
