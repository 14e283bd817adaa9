"""delta-prop for harnesses of others: a folder of its own, which such a harness looks into first."""
