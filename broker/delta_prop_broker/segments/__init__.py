"""The segment files of a log: their formats, how each is written, read and checked."""
