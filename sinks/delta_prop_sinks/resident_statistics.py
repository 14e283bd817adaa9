"""The statistics of resident vectors. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResidentStatistics:
    """Counts since the vectors were created, and their present contents.

    `out_of_order`: forwarded deltas that sort before an earlier one of their vector.
    `below_snapshot`: forwarded deltas that sort before the state with which the log begins; they have no
    effect, and count as ignored.
    `refolded_from_log`: vectors folded from the log, in `log_passes` reads of it.
    `refolded`: deltas folded by refolds, the out-of-order deltas included.
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
    below_snapshot: int
    refolded_from_log: int
    log_passes: int
    refolded: int
    evicted: int
    chains: int
    chain_bytes: int
