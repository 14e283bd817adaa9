"""The batches in flight on one connection, by the sequences under which they were sent.

Pure. It maps sequences to batches and does not interpret outcomes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

from delta_prop.client.ack_ranges import record_ack_range

if TYPE_CHECKING:
    from delta_prop.client.sequence_sender import UnackedBatch
    from delta_prop_wire.frames import Ack


class InFlight:
    """Batches in the order in which they were sent. An answered batch is removed."""

    def __init__(self) -> None:
        self._sequences: list[int] = []  # the sequence of each batch's first row, ascending
        self._batches: list[UnackedBatch | None] = []
        self._next_sequence = 1

    def clear(self) -> None:
        """Drop everything: the connection is lost, and sequences restart at 1."""
        self._sequences.clear()
        self._batches.clear()
        self._next_sequence = 1

    def add(self, unacked: UnackedBatch) -> None:
        """Add a batch that is sent now, under the next sequences."""
        unacked.sequence = self._next_sequence
        unacked.send_count += 1
        self._sequences.append(self._next_sequence)
        self._batches.append(unacked)
        self._next_sequence += unacked.batch.count

    def take_acked(self, ack: Ack) -> Iterator[UnackedBatch]:
        """Yield, once, each batch whose rows are all acknowledged now."""
        starts, batches = self._sequences, self._batches
        for acked in ack.ranges:
            index = max(bisect_right(starts, acked.first) - 1, 0)
            while index < len(starts) and starts[index] <= acked.last:
                unacked = batches[index]
                if (
                    unacked is not None
                    and starts[index] + unacked.batch.count > acked.first
                    and record_ack_range(unacked, acked)
                ):
                    batches[index] = None
                    yield unacked
                index += 1
        for index, unacked in enumerate(batches):
            if starts[index] > ack.sequence:
                break
            if unacked is not None and starts[index] + unacked.batch.count - 1 <= ack.sequence:
                batches[index] = None
                yield unacked
        self._trim()

    def take(self, sequence: int) -> UnackedBatch | None:
        """Remove and return the batch whose first sequence this is, if it has no answer yet; else None."""
        index = bisect_right(self._sequences, sequence) - 1
        if index < 0 or self._sequences[index] != sequence:
            return None
        unacked, self._batches[index] = self._batches[index], None
        self._trim()
        return unacked

    def _trim(self) -> None:
        """Drop the answered batches at the front."""
        done = 0
        while done < len(self._batches) and self._batches[done] is None:
            done += 1
        if done:
            del self._batches[:done], self._sequences[:done]
