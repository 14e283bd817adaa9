"""What a check finds: the promise that was broken, by its short name, and the evidence.

Pure. Every check has its line in `CHECKS`; nobody raises a name that is not there.
"""

from __future__ import annotations

CHECKS = {
    "bounds": "whatever waits stays within its bound, in count and in bytes",
    "marks": "first offset ≤ synced ≤ written ≤ next offset, and no mark goes back but by a recovery",
    "early": "nothing is delivered at or beyond the visible mark",
    "cursor": "no sink is further than the visible mark, nor committed beyond what it applied",
    "credit": "no connection sends or is owed more than was granted",
    "lost": "what was acknowledged is in the log after all that its level survives",
    "twice": "no dot takes effect twice, and what a sink has dealt with does not come again",
    "refused": "what was refused for good or withdrawn never takes effect",
    "repeat": "a repeat is told the offset of its first copy",
    "answer": "an acknowledgement says where the log has it, at the level that was asked for",
    "order": "a sink is brought rows in the order of the log, one call at a time",
    "gap": "a sink misses no row but those in its quarantine",
    "foreign": "a sink is brought nothing but what its log holds",
    "causal": "the log is a linear extension of causality: own counters, clocks and parents come before",
    "expected": "a delta that expects a head is taken only where its vector's last delta is that one",
    "state": "a sink's state is the canonical fold of what the log held, without its quarantine",
    "drift": "services that hold the same deltas hold the same state",
    "counter": "what each writer was told it added is what the vector holds",
    "subscriber": "a subscriber gets each delta of its topics, in order, none that it had said it has",
    "quarantine": "nothing but poison is set aside, and what lines up behind it",
    "damage": "the log reads whole from the disk, and says what was appended",
    "progress": "once everything is healed, all is dealt with before a deadline",
    "work": "a call that brings late deltas folds each vector once, however many they are",
    "hang": "no task waits for ever",
    "crash": "no exception leaves the service that its documentation does not name",
}
"""Each check and what it promises."""


class Violation(Exception):
    """A promise was broken. `check` is its name in `CHECKS`, `what` the evidence."""

    def __init__(self, check: str, what: str) -> None:
        if check not in CHECKS:
            raise ValueError(f"check {check!r} has no line in CHECKS: give one of {', '.join(CHECKS)}")
        super().__init__(f"{check}: {what}")
        self.check = check
        self.what = what


def demand(held: bool, check: str, what: str) -> None:
    """Raise Violation unless it held. Where many are looked at, ask first: `what` is made in any case."""
    if not held:
        raise Violation(check, what)
