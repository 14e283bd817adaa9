"""A violation of a promise: the name of the check that found it, and the evidence.

Pure. Every check must be listed in `CHECKS`.
"""

from __future__ import annotations

CHECKS = {
    "bounds": "every queue stays within its bound, in count and in bytes",
    "marks": "start offset ≤ synced ≤ written ≤ next offset, and none of them goes back except in a recovery",
    "early": "nothing is delivered at or above the high watermark",
    "cursor": "no sink is above the high watermark, or commits more than it applied",
    "credit": "no connection sends or is owed more than was granted",
    "lost": "every acknowledged delta is in the log after any failure that its level survives",
    "twice": "no dot takes effect twice, and no sink gets a row again that it has processed",
    "refused": "a delta that was finally refused or withdrawn never takes effect",
    "repeat": "a duplicate is acknowledged with the offset of its first copy",
    "answer": "an acknowledgement names the delta's offset in the log, at the requested level",
    "order": "a sink gets rows in the order of the log, one call at a time",
    "gap": "a sink has every row except those in its quarantine",
    "foreign": "a sink gets nothing except what its log holds",
    "causal": "the log is a linear extension of causality: own counters, clocks and parents come before",
    "expected": "a delta that expects a head is accepted only if that head is the vector's last delta",
    "state": "a sink's state is the canonical fold of what the log held, without its quarantine",
    "drift": "services that hold the same deltas hold the same state",
    "counter": "a vector holds the sum of all values that acknowledged deltas added",
    "subscriber": "a subscriber gets each delta of its topics, in order, and none that it had saved",
    "quarantine": "only poison and its dependents are quarantined",
    "corruption": "the log on disk is readable, and holds what was appended",
    "progress": "after healing, all work is processed before a deadline",
    "work": "a call with late deltas folds each vector once, however many late deltas there are",
    "hang": "no task waits for ever",
    "crash": "the service raises no exception that its documentation does not name",
}
"""The promise that each check tests."""


class Violation(Exception):
    """Raised if a promise is broken. `check`: the check's name in `CHECKS`; `what`: the evidence."""

    def __init__(self, check: str, what: str) -> None:
        if check not in CHECKS:
            raise ValueError(f"check {check!r} is not in CHECKS: give one of {', '.join(CHECKS)}")
        super().__init__(f"{check}: {what}")
        self.check = check
        self.what = what


def require(condition: bool, check: str, what: str) -> None:
    """Raise Violation unless the condition is true. Long loops test it first: formatting takes time."""
    if not condition:
        raise Violation(check, what)
