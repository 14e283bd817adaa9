"""What is under way on one connection: batches by the sequences under which they were sent.

Pure. It knows places in a row of numbers, and nothing of what an answer means.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from delta_prop.client.answers import note

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop.client.lane import OpenFrame
    from delta_prop_wire.frames import Ack


class Flight:
    """Batches in the order in which they were sent. Who has an answer leaves."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # the sequence of each one's first row, rising
        self._frames: list[OpenFrame | None] = []
        self._next = 1

    def clear(self) -> None:
        """The connection is gone: numbers begin anew."""
        self._starts.clear()
        self._frames.clear()
        self._next = 1

    def add(self, frame: OpenFrame) -> None:
        """It is sent now, under the next numbers."""
        frame.sequence = self._next
        frame.sent += 1
        self._starts.append(self._next)
        self._frames.append(frame)
        self._next += frame.batch.count

    def answered(self, ack: Ack) -> Iterator[OpenFrame]:
        """The batches of which all rows have been told now, each once."""
        starts, frames = self._starts, self._frames
        for told in ack.ranges:
            place = max(bisect_right(starts, told.first) - 1, 0)
            while place < len(starts) and starts[place] <= told.last:
                frame = frames[place]
                if frame is not None and starts[place] + frame.batch.count > told.first and note(frame, told):
                    frames[place] = None
                    yield frame
                place += 1
        for place, frame in enumerate(frames):
            if starts[place] > ack.sequence:
                break
            if frame is not None and starts[place] + frame.batch.count - 1 <= ack.sequence:
                frames[place] = None
                yield frame
        self._trim()

    def take(self, sequence: int) -> OpenFrame | None:
        """The batch that was sent under this number and has no answer, which it has now."""
        place = bisect_right(self._starts, sequence) - 1
        if place < 0 or self._starts[place] != sequence:
            return None
        frame, self._frames[place] = self._frames[place], None
        self._trim()
        return frame

    def _trim(self) -> None:
        """Forget what stands in front and is answered."""
        done = 0
        while done < len(self._frames) and self._frames[done] is None:
            done += 1
        if done:
            del self._frames[:done], self._starts[:done]
