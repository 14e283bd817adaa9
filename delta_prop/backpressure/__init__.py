"""Backpressure: credit (a hard bound) and a rate per pacing sink, and the gate before the pipeline."""
