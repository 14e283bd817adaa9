"""From the log to the sinks: routing, feeds, quarantines, rebuilds, pacing."""
