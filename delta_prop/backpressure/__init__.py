"""Backpressure: credit as a hard bound, a rate for each pacing sink, and the gate before the pipeline."""
