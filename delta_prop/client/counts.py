"""Counters of a producer. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Counts since the producer was made: batches and deltas sent, deltas that have an outcome.

    `resent`: batches sent more than once. `lost`: deltas once acknowledged that the service no longer has,
    as their ack level allowed.
    """

    batches: int = 0
    deltas: int = 0
    resent: int = 0
    acknowledged: int = 0
    refused: int = 0
    lost: int = 0
