"""The history of single vectors: what the log, or its snapshot, still holds of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.partition.ingest.expectations import is_alive_after
from delta_prop_wire.delta import Head

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.batch import LoggedBatch

_READ_ROWS_MAX = 500
_READ_BYTES_MAX = 1024 * 1024
"""Maximum bytes of one read of the log for a vector's history: some milliseconds of the event loop."""


def find_head(history: Iterable[tuple[LoggedBatch, int] | None]) -> Head | None:
    """Return the head of the vector with these deltas, given in log order; None if there are none."""
    rows = [batch_and_row for batch_and_row in history if batch_and_row is not None]
    alive: bool | None = None
    for logged, row in sorted(rows, key=lambda pair: pair[0].key(pair[1])):
        alive = is_alive_after(logged.batch.kinds[row], alive)
    if alive is None:
        return None
    last_batch, last_row = rows[-1]
    return Head(last_batch.batch.dot(last_row), alive)


def read_history(log: Log, vectors: Collection[tuple[str, str]]) -> Iterator[tuple[LoggedBatch, int] | None]:
    """Yield the deltas that a log still holds of some vectors, in log order. Reads the complete log.

    If the log does not start at 0, its snapshot's rows of the vectors come first. Yields None now and then,
    so that the caller can do other work before the next delta. Raises Refused, LogCorrupted, OSError.
    """
    offset = log.start_offset
    snapshot = log.snapshot() if offset else None
    if snapshot is not None:
        offset = snapshot.offset
        try:
            for namespace, vector_id in sorted(vectors):
                yield snapshot.find(namespace, vector_id)
        finally:
            snapshot.close()
    ids_by_namespace: dict[str, set[str]] = {}
    for namespace, vector_id in vectors:
        ids_by_namespace.setdefault(namespace, set()).add(vector_id)
    while batches := log.read(offset, rows_max=_READ_ROWS_MAX, bytes_max=_READ_BYTES_MAX):
        for logged in batches:
            yield from _matching_rows(logged, ids_by_namespace)
        yield None
        offset = batches[-1].next_offset


def _matching_rows(
    logged: LoggedBatch, ids_by_namespace: Mapping[str, set[str]]
) -> Iterator[tuple[LoggedBatch, int]]:
    """Yield the rows of a batch that belong to these vectors."""
    batch = logged.batch
    if batch.is_control:
        return
    if batch.namespace is not None:
        ids = ids_by_namespace.get(batch.namespace)
        if ids is not None and not ids.isdisjoint(batch.keys):
            yield from ((logged, row) for row, key in enumerate(batch.keys) if key in ids)
    elif not ids_by_namespace.keys().isdisjoint(batch.namespace_names):
        for row, (namespace, key) in enumerate(zip(batch.namespaces, batch.keys, strict=True)):
            if key in ids_by_namespace.get(namespace, ()):
                yield logged, row
