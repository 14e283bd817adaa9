"""Deltas as bytes and as arithmetic: layout, frames, operations. Sans-IO; knows nothing else."""
