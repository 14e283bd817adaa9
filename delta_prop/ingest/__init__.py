"""The way in: one bounded queue, who may write, what was seen before. Decides; waits for nothing."""
