"""The files of a log on disk: their formats, how each is written, read and checked."""
