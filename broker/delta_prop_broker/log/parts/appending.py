"""Appending to the log on disk: each batch gets its place and its stamp at once, in memory.

What was appended waits in `Growing` until a commit takes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log import refusals
from delta_prop_broker.log.parts.keeping import Keeping
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import AckLevel, KnownIds, Source
from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import ACK_LEVEL_SHIFT
from delta_prop_wire.stamp import pack_logged_head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_wire.batch import Batch

_DURABLE = int(AckLevel.DURABLE)


class Appending(Keeping):
    """What gives batches their places, where there is room for them."""

    def append(
        self, batch: Batch, *, lamport: int, source: Source, known_ids: KnownIds = KnownIds.NONE
    ) -> LoggedBatch:
        """Give the batch its place, in memory. Raises Refused and changes nothing."""
        if self._mark is None or self._closed:
            raise UsageError("the log is open read-only, or closed: open it for writing")
        size, asked = batch.size, batch.attributes >> ACK_LEVEL_SHIFT & 3
        # A forwarded batch asked the service where it entered for its level, not this one.
        refusal = refusals.level_refusal(batch) if asked > _DURABLE and source is not Source.REPLICA else None
        if refusal is None and not self._has_room(size):
            refusal = self._refusal(size)
        if refusal is not None:
            self._refused += 1
            raise refusal
        self._tail.append(logged := self._place(batch, lamport, source, known_ids, self.clock.read()))
        return logged

    def fits(self, batches: Sequence[Batch]) -> bool:
        """Whether `append_run` would take these; makes room where nobody needs the oldest."""
        size, asked = batches[0].size, batches[0].attributes >> ACK_LEVEL_SHIFT & 3
        if len(batches) > 1:
            size = sum([batch.size for batch in batches])
            asked = max([batch.attributes >> ACK_LEVEL_SHIFT & 3 for batch in batches])
        if self._mark is None or self._closed or asked > _DURABLE or size > self._batch_bytes_max:
            return False
        return self._has_room(size) or self._refusal(size) is None

    def append_run(self, batches: Sequence[Batch], *, lamport: int, source: Source) -> list[LoggedBatch]:
        """`append` for each, one behind the other, in one moment. They fit: that was asked just now."""
        now, placed = self.clock.read(), []
        for batch in batches:
            placed.append(self._place(batch, lamport, source, KnownIds.NONE, now))
            lamport += batch.count
        self._tail.extend(placed)
        return placed

    def _place(
        self, batch: Batch, lamport: int, source: Source, known_ids: KnownIds, now: int
    ) -> LoggedBatch:
        size, offset, previous = batch.size, self.next_offset, self._chain
        seen_us = self.clock.seen_us
        head, crc = pack_logged_head(
            batch, offset, lamport=lamport, source=source, known_ids=known_ids,
            time=now, previous_crc=previous, synced=self.synced,
        )  # fmt: skip
        logged = LoggedBatch(batch, offset, lamport, source, head, known_ids=known_ids)
        segment = (piece := self._growing.piece_for(size, offset=offset, seen_us=seen_us)).segment
        piece.parts += (head, batch.raw)
        piece.position += size
        assert segment.index is not None
        segment.index.add(batch, offset=offset, size=size, time=now, previous_crc=previous, crc=crc)
        segment.size += size
        segment.end = self.next_offset = offset + batch.count
        segment.last_crc = self._chain = crc
        segment.latest_time, segment.seen_last_us = segment.index.latest_time, seen_us
        self._room.bytes += size
        self._unwritten_bytes += size
        if batch.attributes >> ACK_LEVEL_SHIFT & 3 >= _DURABLE or source is Source.REPLICA:
            self._pending_sync = True  # a forwarder sends it once
        return logged
