"""Recovery of a log on disk: recovery point, checkpoints, identity, migration of older formats."""
