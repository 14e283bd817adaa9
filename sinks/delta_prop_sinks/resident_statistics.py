"""What resident vectors tell of themselves. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResidentStatistics:
    """Counts since the structure was made, and what it holds now.

    `beneath_snapshot`: forwarded deltas that sort before a state with which the log's past begins; they have
    no effect, and are among those ignored.
    """

    vectors: int
    bytes: int
    bytes_max: int
    complete: bool
    pinned: bool
    lamport: int
    folded: int
    repeats: int
    ignored: int
    late: int
    beneath_snapshot: int
    refolded_from_log: int
    evicted: int
    chains: int
    chain_bytes: int
