"""Reads the logs of several idle services, and compares the dots and canonical keys of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from delta_prop_wire.delta import Priority, make_origin, producer_id_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from delta_prop import Propagator
    from delta_prop_simulations.scenarios.clients import AckedRows


class DeliveredDelta(NamedTuple):
    """A delta that a reader got: its offset and its dot."""

    offset: int
    origin: int
    counter: int


_READ_ROWS_MAX = 50_000
_READ_BYTES_MAX = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class LogRows:
    """A log's rows in order: offsets, dots, Lamport numbers. `control`: True for a row without a delta."""

    offsets: NDArray[np.uint64]
    origins: NDArray[np.uint64]
    counters: NDArray[np.uint64]
    lamports: NDArray[np.uint64]
    control: NDArray[np.bool_]

    def keys(self) -> NDArray[np.uint64]:
        """Return the sorted canonical keys: services whose logs have the same keys have the same states."""
        order = np.lexsort((self.counters, self.origins, self.lamports))
        return np.stack([self.lamports[order], self.origins[order], self.counters[order]])

    @property
    def delta_count(self) -> int:
        """The number of rows with a delta."""
        return int((~self.control).sum())


def read_log_rows(propagator: Propagator) -> LogRows:
    """Read all rows of a service's log. Raises Refused, LogCorrupted, OSError."""
    log = propagator.internals().partition.log
    offset = log.start_offset
    batches = []
    while read := log.read(offset, rows_max=_READ_ROWS_MAX, bytes_max=_READ_BYTES_MAX):
        batches += read
        offset = read[-1].next_offset

    def column(parts: Iterable[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        return np.concatenate([np.zeros(0, np.uint64), *parts])

    return LogRows(
        column(_range_from(logged.offset, logged.count) for logged in batches),
        column(np.full(logged.count, logged.batch.origin, np.uint64) for logged in batches),
        column(
            _range_from(logged.batch.base, logged.count)
            if logged.batch.counters is None
            else logged.batch.counters
            for logged in batches
        ),
        column(_range_from(logged.lamport, logged.count) for logged in batches),
        column(np.full(logged.count, logged.batch.is_control, np.uint64) for logged in batches).astype(bool),
    )


def count_duplicates(rows: LogRows) -> int:
    """Count the rows with the dot of an earlier row."""
    dots = np.unique(np.stack([rows.origins, rows.counters]), axis=1)
    return len(rows.origins) - int(dots.shape[1])


def count_out_of_order(rows: LogRows) -> int:
    """Count the rows that come directly before a row of the same origin with a lower or equal counter."""
    order = np.argsort(rows.origins, kind="stable")
    origins, counters = rows.origins[order], rows.counters[order]
    return int(((origins[1:] == origins[:-1]) & (counters[1:] <= counters[:-1])).sum())


def count_missing(rows: LogRows, acknowledged: Sequence[AckedRows]) -> int:
    """Count the acknowledged rows whose offset has no delta, or a delta of another producer."""
    if not acknowledged:
        return 0
    offsets = np.concatenate([_range_from(one.offset, one.count) for one in acknowledged])
    owners = np.concatenate([np.full(one.count, index) for index, one in enumerate(acknowledged)])
    if not len(rows.offsets):
        return len(offsets)
    positions = np.minimum(np.searchsorted(rows.offsets, offsets), len(rows.offsets) - 1)
    origins = [_origins(one.producer) for one in acknowledged]
    is_delta = (rows.offsets[positions] == offsets) & ~rows.control[positions]
    is_own = [
        int(origin) in origins[owner] for origin, owner in zip(rows.origins[positions], owners, strict=True)
    ]
    return int((~(is_delta & np.array(is_own, bool))).sum())


def count_lost_deliveries(rows: LogRows, delivered: Sequence[DeliveredDelta]) -> int:
    """Count the delivered deltas that are not at their offset in the log: they were lost after delivery."""
    if not delivered or not len(rows.offsets):
        return len(delivered)
    offsets, origins, counters = np.array(delivered, np.uint64).T
    positions = np.minimum(np.searchsorted(rows.offsets, offsets), len(rows.offsets) - 1)
    same = (rows.offsets[positions] == offsets) & (rows.origins[positions] == origins)
    return int((~(same & (rows.counters[positions] == counters))).sum())


def count_double_acks(acknowledged: Sequence[AckedRows]) -> int:
    """Count the deltas that were acknowledged with the offset of another delta."""
    if not acknowledged:
        return 0
    offsets = np.concatenate([_range_from(one.offset, one.count) for one in acknowledged])
    return len(offsets) - len(np.unique(offsets))


def _origins(producer: str) -> set[int]:
    return {make_origin(producer_id_of(producer), lane) for lane in Priority}


def _range_from(first: int, count: int) -> NDArray[np.uint64]:
    return np.arange(first, first + count, dtype=np.uint64)
