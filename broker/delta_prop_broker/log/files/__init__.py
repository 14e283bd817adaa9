"""What a log is on disk: its files, how each is written, read and checked."""
