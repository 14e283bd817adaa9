"""Deltas as bytes and as arithmetic: layout, frames, operations. Sans-IO; imports no other package here."""
