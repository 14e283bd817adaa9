"""Divides the rows of a part between the partitions of a stream.

The pieces depend only on the part's rows, not on the batches in which Spark passes them. So the pieces of a
retried part are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from delta_prop.spark.arrays import concat_batches
from delta_prop.spark.data_source.blocks import partitions_of_rows
from delta_prop.spark.data_source.slices import content_size, slice_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP_SLICES_MAX = 8
GROUP_BYTES = 16 * 1024 * 1024
"""Up to so many slices, of about so many bytes, are divided together: else a slice divided between many
partitions would give many small blocks. Other values break running streams of several partitions."""


class PartitionRows(NamedTuple):
    """Rows of a part that belong to one partition; `numbers`: those of the rows in the part, from 0."""

    partition: int
    rows: pa.RecordBatch
    numbers: NDArray[np.int64]

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return int(self.rows.num_rows)

    def slice(self, start: int, count: int) -> PartitionRows:
        """Return some of the rows."""
        return PartitionRows(
            self.partition, self.rows.slice(start, count), self.numbers[start : start + count]
        )


def divide(
    batches: Iterable[pa.RecordBatch], partition_count: int, namespace: str | None
) -> Iterator[PartitionRows]:
    """Yield a part's rows in pieces, each for one partition; within a partition, rows keep their order.

    `namespace`: as for `to_block`. Raises InvalidDelta for a row without a vector.
    """
    before = 0
    for rows in _gather(slice_blocks(batches), min(partition_count, GROUP_SLICES_MAX)):
        numbers = np.arange(before, before + rows.num_rows)
        if partition_count == 1:
            yield PartitionRows(0, rows, numbers)
        else:
            partitions = partitions_of_rows(rows, partition_count, namespace=namespace, before=before)
            yield from _split(rows, numbers, partitions)
        before += rows.num_rows


def _gather(slices: Iterable[pa.RecordBatch], slices_max: int) -> Iterator[pa.RecordBatch]:
    pending: list[pa.RecordBatch] = []
    size = 0
    for rows in slices:
        pending.append(rows)
        size += content_size(rows)
        if len(pending) >= slices_max or size >= GROUP_BYTES:
            yield concat_batches(pending)
            pending, size = [], 0
    if pending:
        yield concat_batches(pending)


def _split(
    rows: pa.RecordBatch, numbers: NDArray[np.int64], partitions: NDArray[np.intp]
) -> Iterator[PartitionRows]:
    order = np.argsort(partitions, kind="stable")
    counts = np.bincount(partitions)
    for partition, own in enumerate(np.split(order, np.cumsum(counts)[:-1])):
        if not len(own):
            continue
        own_rows, own_numbers = rows.take(pa.array(own)), numbers[own]
        start = 0
        for piece in slice_blocks([own_rows]):
            yield PartitionRows(partition, piece, own_numbers[start : start + piece.num_rows])
            start += piece.num_rows
