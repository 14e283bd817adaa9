"""What resident vectors tell of themselves. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResidentStatistics:
    """Counts since the structure was made, and what it holds now.

    `late`: forwarded deltas that sort before one of their vector that came earlier. `beneath_snapshot`: those
    that sort before a state with which the log's past begins; they have no effect, and count as ignored.
    `refolded_from_log`: how often a vector was folded from the log, in `log_passes` readings of it.
    `folded_again`: deltas that were folded to put the late ones in their places, those among them.
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
    log_passes: int
    folded_again: int
    evicted: int
    chains: int
    chain_bytes: int
