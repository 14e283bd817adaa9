"""Reads the logs of several services at rest, row by row, and compares them.

It compares numbers only: the dot and the canonical key of each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from delta_prop_wire.delta import Priority, make_origin, producer_id_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from delta_prop import Propagator
    from delta_prop_simulations.scenarios.clients import AckedRows


class ShownDelta(NamedTuple):
    """A delta as a reader got it: its offset and its dot."""

    offset: int
    origin: int
    counter: int


_ROWS = 50_000
_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class LogRows:
    """A log's rows in order: offsets, dots, Lamport numbers. `control`: a row without a delta."""

    offsets: NDArray[np.uint64]
    origins: NDArray[np.uint64]
    counters: NDArray[np.uint64]
    lamports: NDArray[np.uint64]
    control: NDArray[np.bool_]

    def keys(self) -> NDArray[np.uint64]:
        """Return the sorted canonical keys: services with the same keys fold to the same states."""
        order = np.lexsort((self.counters, self.origins, self.lamports))
        return np.stack([self.lamports[order], self.origins[order], self.counters[order]])

    @property
    def deltas(self) -> int:
        """The number of rows with a delta."""
        return int((~self.control).sum())


def read_log_rows(propagator: Propagator) -> LogRows:
    """Read all rows of a service's log. Raises Refused, LogCorrupted, OSError."""
    log = propagator.internals().log
    offset = log.start_offset
    batches = []
    while found := log.read(offset, rows_max=_ROWS, bytes_max=_BYTES):
        batches += found
        offset = found[-1].next_offset

    def column(of: Iterable[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        return np.concatenate([np.zeros(0, np.uint64), *of])

    return LogRows(
        column(_counters_from(one.offset, one.count) for one in batches),
        column(np.full(one.count, one.batch.origin, np.uint64) for one in batches),
        column(
            _counters_from(one.batch.base, one.count) if one.batch.counters is None else one.batch.counters
            for one in batches
        ),
        column(_counters_from(one.lamport, one.count) for one in batches),
        column(np.full(one.count, one.batch.is_control, np.uint64) for one in batches).astype(bool),
    )


def count_duplicates(rows: LogRows) -> int:
    """Count the rows whose dot another row has too."""
    dots = np.unique(np.stack([rows.origins, rows.counters]), axis=1)
    return len(rows.origins) - int(dots.shape[1])


def count_out_of_order(rows: LogRows) -> int:
    """Count the rows that come before a row of their own origin that they depend on."""
    order = np.argsort(rows.origins, kind="stable")
    origins, counters = rows.origins[order], rows.counters[order]
    return int(((origins[1:] == origins[:-1]) & (counters[1:] <= counters[:-1])).sum())


def count_missing(rows: LogRows, acknowledged: Sequence[AckedRows]) -> int:
    """Count the acknowledged rows that are not at their offset, or not of their producer."""
    if not acknowledged:
        return 0
    offsets = np.concatenate([_counters_from(one.offset, one.count) for one in acknowledged])
    owners = np.concatenate([np.full(one.count, place) for place, one in enumerate(acknowledged)])
    if not len(rows.offsets):
        return len(offsets)
    positions = np.minimum(np.searchsorted(rows.offsets, offsets), len(rows.offsets) - 1)
    origins = [_origins(one.producer) for one in acknowledged]
    right = (rows.offsets[positions] == offsets) & ~rows.control[positions]
    own = [
        int(origin) in origins[number] for origin, number in zip(rows.origins[positions], owners, strict=True)
    ]
    return int((~(right & np.array(own, bool))).sum())


def count_withdrawn(rows: LogRows, shown: Sequence[ShownDelta]) -> int:
    """Count the deltas that a reader got but that are not at their offset: they were lost after delivery."""
    if not shown or not len(rows.offsets):
        return len(shown)
    offsets, origins, counters = np.array(shown, np.uint64).T
    positions = np.minimum(np.searchsorted(rows.offsets, offsets), len(rows.offsets) - 1)
    same = (rows.offsets[positions] == offsets) & (rows.origins[positions] == origins)
    return int((~(same & (rows.counters[positions] == counters))).sum())


def count_double_acks(acknowledged: Sequence[AckedRows]) -> int:
    """Count the offsets that two deltas were acknowledged with."""
    if not acknowledged:
        return 0
    offsets = np.concatenate([_counters_from(one.offset, one.count) for one in acknowledged])
    return len(offsets) - len(np.unique(offsets))


def _origins(producer: str) -> set[int]:
    return {make_origin(producer_id_of(producer), lane) for lane in Priority}


def _counters_from(first: int, count: int) -> NDArray[np.uint64]:
    return np.arange(first, first + count, dtype=np.uint64)
