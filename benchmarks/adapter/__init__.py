"""delta-prop for harnesses that are not of this checkout: a folder of its own, which such a harness looks into first."""
