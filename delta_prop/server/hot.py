"""What waits to be sent on one connection: batches with their rows, made into frames when their turn comes.

Whole batches go as the bytes that the log keeps; rows of one as a cut frame, or each as a Delta frame. It
waits for nobody, and does a bounded part of the work at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_wire.codec import encode
from delta_prop_wire.cutting import cut
from delta_prop_wire.frames import DeltaFrame
from delta_prop_wire.spec import FRAME_PAYLOAD_BYTES_MAX
from delta_prop_wire.stamp import pack_logged_head

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop.route.table import Rows
    from delta_prop_broker.disk import FileRange
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.window import Window

MADE_MAX = 64
"""Frames that are cut, or made of single deltas, at a time: each takes as long as a hundred whole ones."""
BATCH_OVERHEAD_BYTES = 256
"""What a batch that waits costs beside its bytes, which the log may hold as well."""
_UNBOUNDED = 1 << 62
_ROW_BYTES_MAX = 16
"""What a row of a cut frame says beyond what the whole one says of it: its offset, its counter."""


@dataclass(slots=True)
class Sending:
    """What is to be written next: buffers, or a part of a file that stays until the next one is asked for."""

    parts: list[Buffer] | FileRange
    deltas: int
    bytes: int
    next_offset: int


class HotQueue:
    """First in, first out. `waiting`: batches with their rows, None for all of them."""

    __slots__ = ("bytes", "deltas", "waiting")

    def __init__(self) -> None:
        self.deltas = self.bytes = 0
        self.waiting: deque[tuple[LoggedBatch, Rows]] = deque()

    @property
    def first_offset(self) -> int:
        """Of the first row that waits."""
        logged, rows = self.waiting[0]
        return logged.offset if rows is None else logged.offset + int(rows[0])

    def put(self, logged: LoggedBatch, rows: Rows) -> None:
        """Have these sent behind all that waits."""
        self.waiting.append((logged, rows))
        self.deltas += logged.batch.count if rows is None else len(rows)
        self.bytes += logged.batch.size + BATCH_OVERHEAD_BYTES

    def clear(self) -> None:
        """Let everything go."""
        self.waiting.clear()
        self.deltas = self.bytes = 0

    def take_lone(self, window: Window) -> Sending | None:
        """The one batch that waits, where all of it is wanted and the window is open: what `take` gives, as
        whole batches, in a few steps. None where it is otherwise.
        """
        waiting = self.waiting
        if len(waiting) != 1 or waiting[0][1] is not None or not window.open:
            return None
        logged = waiting.popleft()[0]
        batch = logged.batch
        count, size = batch.count, batch.size
        window.spend(count, size)
        self.deltas = self.bytes = 0
        return Sending([logged.head or _make_head(logged), batch.raw], count, size, logged.offset + count)

    def take(
        self, window: Window, bytes_max: int, *, as_deltas: bool, rows_max: int | None = None
    ) -> Sending:
        """The next frames, of about so many bytes, as far as the window allows; at least one must wait.

        `rows_max`: no more rows than these, and one at least. A batch that has more by itself is cut.
        """
        parts: list[Buffer] = []
        sent = Sending(parts, 0, 0, 0)
        made = 0
        rows_max = _UNBOUNDED if rows_max is None else rows_max
        while self.waiting and sent.bytes < bytes_max and made < MADE_MAX and window.open:
            logged, rows = self.waiting[0]
            count, left = logged.count if rows is None else len(rows), rows_max - sent.deltas
            if left <= 0 or (count > left and parts and not as_deltas):
                break  # the batch comes first the next time, and may then go whole
            if rows is None and count <= left and not as_deltas:
                self._add_whole(sent, parts, window, bytes_max - sent.bytes, left)
                continue
            self.waiting.popleft()
            self.bytes -= logged.batch.size + BATCH_OVERHEAD_BYTES
            if as_deltas:
                deltas, size, rest = _add_deltas(
                    parts, logged, rows, window, bytes_max=bytes_max - sent.bytes, rows_max=left
                )
                made += deltas
            else:
                deltas, size, rest = _add_cut(parts, logged, rows, left)
                window.spend(deltas, size)
                made += 1
            sent.deltas += deltas
            sent.bytes += size
            self.deltas -= deltas
            sent.next_offset = logged.next_offset
            if rest is not None:
                self.waiting.appendleft((logged, rest))
                self.bytes += logged.batch.size + BATCH_OVERHEAD_BYTES
                sent.next_offset = self.first_offset
        return sent

    def _add_whole(
        self, sent: Sending, parts: list[Buffer], window: Window, bytes_max: int, rows_max: int
    ) -> None:
        """Batches that go as they lie, one behind the other: what they share is done once for all of them."""
        waiting, left = self.waiting, window.left
        deltas_left = _UNBOUNDED if left is None else left.deltas
        bytes_left = bytes_max if left is None else min(left.bytes, bytes_max)
        deltas = size = overhead = 0
        while waiting and waiting[0][1] is None and size < bytes_left and deltas < deltas_left:
            batch = waiting[0][0].batch
            if deltas + batch.count > rows_max:
                break
            logged = waiting.popleft()[0]
            parts += (logged.head or _make_head(logged), batch.raw)
            deltas += batch.count
            size += batch.size
            overhead += BATCH_OVERHEAD_BYTES
        window.spend(deltas, size)
        self.deltas -= deltas
        self.bytes -= size + overhead
        sent.deltas += deltas
        sent.bytes += size
        sent.next_offset = logged.next_offset


def _make_head(logged: LoggedBatch) -> bytes:
    """What a log in memory has no use for itself; made once, for all who are sent this batch."""
    logged.head, _ = pack_logged_head(
        logged.batch,
        logged.offset,
        lamport=logged.lamport,
        source=logged.source,
        time=0,
        previous_crc=0,
        synced=0,
        known_ids=logged.known_ids,
    )
    return logged.head


def _add_cut(parts: list[Buffer], logged: LoggedBatch, rows: Rows, rows_max: int) -> tuple[int, int, Rows]:
    """One cut frame of these rows, or of the first of them where all would be too many or too large."""
    if rows is None:
        rows = np.arange(logged.count)
    rest = None
    if len(rows) > rows_max:
        rows, rest = rows[:rows_max], rows[rows_max:]
    while logged.batch.size + _ROW_BYTES_MAX * len(rows) > FRAME_PAYLOAD_BYTES_MAX and len(rows) > 1:
        half = len(rows) // 2
        rest = rows[half:] if rest is None else np.concatenate((rows[half:], rest))
        rows = rows[:half]
    frame = cut(logged, rows)
    parts += frame
    return len(rows), sum(map(len, frame)), rest


def _add_deltas(
    parts: list[Buffer], logged: LoggedBatch, rows: Rows, window: Window, *, bytes_max: int, rows_max: int
) -> tuple[int, int, Rows]:
    """A frame for each row, as many as may go now."""
    count = logged.count if rows is None else len(rows)
    done = size = 0
    while done < min(count, MADE_MAX, rows_max) and size < bytes_max and window.open:
        row = done if rows is None else int(rows[done])
        delta = logged.batch.delta(row, logged.source)
        frame = encode(DeltaFrame(logged.offset + row, delta, lamport=logged.lamport + row))
        window.spend(1, len(frame))
        parts.append(frame)
        size += len(frame)
        done += 1
    if done == count:
        return done, size, None
    return done, size, np.arange(done, count) if rows is None else rows[done:]
