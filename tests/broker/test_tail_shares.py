"""The tails of the logs of one data directory share one bound of memory."""

from __future__ import annotations

from delta_prop_broker.log.stored_batches import TAIL_BYTES_MIN, Tail, weight
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Source
from tests.broker.durable import batch_of

MIB = 1024 * 1024


def held_after_trim(logs: int, *, bytes_max: int) -> int:
    """Return the bytes that a tail keeps of 6 MiB, in a directory with so many open logs."""
    tail = Tail(0, bytes_max=bytes_max, open_logs={f"log {number}" for number in range(logs)})
    offset = 0
    while tail.bytes < 6 * MIB:
        batch = batch_of(100, offset + 1, dimension=32)
        tail.append(LoggedBatch(batch, offset, offset + 1, Source.LOCAL))
        offset += batch.count
    tail.trim(offset)
    return tail.bytes


def test_tail_keeps_its_share_of_the_memory() -> None:
    slack = weight(batch_of(100, 1, dimension=32))
    for logs, share in ((1, 4 * MIB), (2, 2 * MIB), (4, TAIL_BYTES_MIN), (1_000, TAIL_BYTES_MIN)):
        assert share - slack <= held_after_trim(logs, bytes_max=4 * MIB) <= share
