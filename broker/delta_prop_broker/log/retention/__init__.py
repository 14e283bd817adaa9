"""What stays of a log and in which form: who holds it, what goes, snapshots of what went, compression."""
