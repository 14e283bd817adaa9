"""The statistics of resident vectors. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResidentStatistics:
    """Counts since the structure was made, and what it holds now.

    `out_of_order`: forwarded deltas that sort before an earlier one of their vector.
    `beneath_snapshot`: those that sort before the state with which the log begins; they have no effect, and
    count as ignored.
    `refolded_from_log`: vectors folded from the log, in `log_passes` reads of it.
    `refolded`: deltas folded to put those in order, themselves included.
    """

    vectors: int
    bytes: int
    bytes_max: int
    complete: bool
    pinned: bool
    lamport: int
    folded: int
    duplicates: int
    ignored: int
    out_of_order: int
    beneath_snapshot: int
    refolded_from_log: int
    log_passes: int
    refolded: int
    evicted: int
    chains: int
    chain_bytes: int
