"""The send queue of one connection, and when it sends: batches with their rows, encoded when they are taken.

Complete batches are sent as the bytes that the log stores; selected rows as a sliced frame, or each as a
Delta frame. It never waits, and a call encodes a bounded number of frames.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Final

import numpy as np

from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.codec import encode
from delta_prop_wire.frames import DeltaFrame, Subscription
from delta_prop_wire.slicing import slice_rows
from delta_prop_wire.spec import FRAME_PAYLOAD_BYTES_MAX
from delta_prop_wire.stamp import pack_logged_head

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from delta_prop.delivery.routing_table import Rows
    from delta_prop.platform.ports import Clock
    from delta_prop_broker.disk import FileRange
    from delta_prop_wire.credit_window import CreditWindow

ENCODED_MAX = 64
"""Maximum sliced or Delta frames encoded at a time: each costs as much as a hundred complete frames."""
BATCH_OVERHEAD_BYTES = 256
"""Memory of a queued batch besides its bytes, which the log may hold as well."""
_UNBOUNDED = 1 << 62
_ROW_OVERHEAD_BYTES = 16
"""Bytes that a row takes in a sliced frame only: its offset and its counter."""


@dataclass(slots=True)
class SendChunk:
    """The next bytes to write: buffers, or a range of a file that stays open until the next `take`.

    `next_offset`: the offset of the next row to send after them.
    """

    parts: list[Buffer] | FileRange
    delta_count: int
    bytes: int
    next_offset: int


class SendQueue:
    """A FIFO queue. `waiting`: batches, each with its rows to send, None for all of them.

    `bytes_max`: the bytes up to which batches are pushed into it; a batch that is alone may exceed them.
    """

    __slots__ = ("bytes", "bytes_max", "delta_count", "waiting")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.delta_count = self.bytes = 0
        self.waiting: deque[tuple[LoggedBatch, Rows]] = deque()

    @property
    def first_offset(self) -> int:
        """The offset of the first queued row."""
        logged, rows = self.waiting[0]
        return logged.offset if rows is None else logged.offset + int(rows[0])

    def put(self, logged: LoggedBatch, rows: Rows) -> None:
        """Append a batch and its rows."""
        self.waiting.append((logged, rows))
        self.delta_count += logged.batch.count if rows is None else len(rows)
        self.bytes += logged.batch.size + BATCH_OVERHEAD_BYTES

    def clear(self) -> None:
        """Drop everything."""
        self.waiting.clear()
        self.delta_count = self.bytes = 0

    def take_single(self, window: CreditWindow) -> SendChunk | None:
        """Take the only queued batch, if all its rows are queued and the window is open; else return None.

        A fast path of `take`.
        """
        waiting = self.waiting
        if len(waiting) != 1 or waiting[0][1] is not None or not window.is_open:
            return None
        logged = waiting.popleft()[0]
        batch = logged.batch
        count, size = batch.count, batch.size
        window.spend(count, size)
        self.delta_count = self.bytes = 0
        return SendChunk([logged.head or _make_head(logged), batch.raw], count, size, logged.offset + count)

    def take(
        self, window: CreditWindow, bytes_max: int, *, as_deltas: bool, rows_max: int | None = None
    ) -> SendChunk:
        """Return the next frames, of about `bytes_max`, as the window allows. The queue must not be empty.

        `rows_max`: the maximum number of rows, at least one; a batch with more is sliced.
        """
        parts: list[Buffer] = []
        chunk = SendChunk(parts, 0, 0, 0)
        encoded_frames = 0
        rows_max = _UNBOUNDED if rows_max is None else rows_max
        while self.waiting and chunk.bytes < bytes_max and encoded_frames < ENCODED_MAX and window.is_open:
            logged, rows = self.waiting[0]
            count, rows_left = logged.count if rows is None else len(rows), rows_max - chunk.delta_count
            if rows_left <= 0 or (count > rows_left and parts and not as_deltas):
                break  # the next chunk begins with this batch, and may then have all its rows
            if rows is None and count <= rows_left and not as_deltas:
                self._add_batches(chunk, parts, window, bytes_max - chunk.bytes, rows_left)
                continue
            self.waiting.popleft()
            self.bytes -= logged.batch.size + BATCH_OVERHEAD_BYTES
            if as_deltas:
                delta_count, size, unsent_rows = _add_deltas(
                    parts, logged, rows, window, bytes_max=bytes_max - chunk.bytes, rows_max=rows_left
                )
                encoded_frames += delta_count
            else:
                delta_count, size, unsent_rows = _add_sliced(parts, logged, rows, rows_left)
                window.spend(delta_count, size)
                encoded_frames += 1
            chunk.delta_count += delta_count
            chunk.bytes += size
            self.delta_count -= delta_count
            chunk.next_offset = logged.next_offset
            if unsent_rows is not None:
                self.waiting.appendleft((logged, unsent_rows))
                self.bytes += logged.batch.size + BATCH_OVERHEAD_BYTES
                chunk.next_offset = self.first_offset
        return chunk

    def _add_batches(
        self, chunk: SendChunk, parts: list[Buffer], window: CreditWindow, bytes_max: int, rows_max: int
    ) -> None:
        """Add the next complete batches, and account for them together."""
        waiting, remaining = self.waiting, window.remaining
        deltas_left = _UNBOUNDED if remaining is None else remaining.deltas
        bytes_left = bytes_max if remaining is None else min(remaining.bytes, bytes_max)
        delta_count = size = overhead = 0
        while waiting and waiting[0][1] is None and size < bytes_left and delta_count < deltas_left:
            batch = waiting[0][0].batch
            if delta_count + batch.count > rows_max:
                break
            logged = waiting.popleft()[0]
            parts += (logged.head or _make_head(logged), batch.raw)
            delta_count += batch.count
            size += batch.size
            overhead += BATCH_OVERHEAD_BYTES
        window.spend(delta_count, size)
        self.delta_count -= delta_count
        self.bytes -= size + overhead
        chunk.delta_count += delta_count
        chunk.bytes += size
        chunk.next_offset = logged.next_offset


def _make_head(logged: LoggedBatch) -> bytes:
    """Return the head of a batch whose log stores no heads; made once, for all connections."""
    logged.head, _ = pack_logged_head(
        logged.batch,
        logged.offset,
        lamport=logged.lamport,
        source=logged.source,
        time=0,
        previous_crc=0,
        synced_offset=0,
        known_ids=logged.known_ids,
    )
    return logged.head


def _add_sliced(parts: list[Buffer], logged: LoggedBatch, rows: Rows, rows_max: int) -> tuple[int, int, Rows]:
    """Add one sliced frame with these rows, or with the first of them if all are too many or too large.

    Returns the rows and bytes added, and the rows left over; None if none are.
    """
    if rows is None:
        rows = np.arange(logged.count)
    unsent_rows = None
    if len(rows) > rows_max:
        rows, unsent_rows = rows[:rows_max], rows[rows_max:]
    while logged.batch.size + _ROW_OVERHEAD_BYTES * len(rows) > FRAME_PAYLOAD_BYTES_MAX and len(rows) > 1:
        half = len(rows) // 2
        unsent_rows = rows[half:] if unsent_rows is None else np.concatenate((rows[half:], unsent_rows))
        rows = rows[:half]
    frame = slice_rows(logged, rows)
    parts += frame
    return len(rows), sum(map(len, frame)), unsent_rows


def _add_deltas(
    parts: list[Buffer],
    logged: LoggedBatch,
    rows: Rows,
    window: CreditWindow,
    *,
    bytes_max: int,
    rows_max: int,
) -> tuple[int, int, Rows]:
    """Add a Delta frame for each row, as many as may be sent now.

    Returns the rows and bytes added, and the rows left over; None if none are.
    """
    count = logged.count if rows is None else len(rows)
    row_count = size = 0
    while row_count < min(count, ENCODED_MAX, rows_max) and size < bytes_max and window.is_open:
        row = row_count if rows is None else int(rows[row_count])
        delta = logged.batch.delta(row, logged.source)
        frame = encode(DeltaFrame(logged.offset + row, delta, lamport=logged.lamport + row))
        window.spend(1, len(frame))
        parts.append(frame)
        size += len(frame)
        row_count += 1
    if row_count == count:
        return row_count, size, None
    return row_count, size, np.arange(row_count, count) if rows is None else rows[row_count:]


READ_RETRY_S = 0.5
"""Seconds after which the log is read again after a disk failure."""
BATCH_DELTAS_MAX = 10_000
"""Maximum of a subscription's `batch_deltas_max`; a higher one is reduced to it."""


class SendState(Enum):
    """The result of the last `take`, which decides the events that notify the writer."""

    ACTIVE = "active"  # there may be more to send
    IDLE = "idle"  # everything is sent
    LINGERING = "lingering"
    NO_CREDIT = "no credit"
    DISK_FAILING = "disk failing"


_RESUMED = frozenset({SendState.ACTIVE, SendState.IDLE})
MOVES: Final = {
    SendState.ACTIVE: frozenset(SendState),
    SendState.IDLE: _RESUMED,
    SendState.LINGERING: _RESUMED | {SendState.LINGERING},
    SendState.NO_CREDIT: _RESUMED | {SendState.NO_CREDIT},
    SendState.DISK_FAILING: _RESUMED | {SendState.DISK_FAILING},
}
"""The states that may follow each state. A wait begins only while a session is active."""


class SendTiming:
    """The state of one session's sending.

    `state` may be set to ACTIVE or IDLE directly, since these may follow every state, and batches set them;
    the other states are entered by `enter`.
    """

    def __init__(self, clock: Clock, *, batch_bytes_max: int) -> None:
        self.now = clock.now
        self.state = SendState.ACTIVE
        self.has_just_sent = False
        """True if the next batches may linger."""
        self.oldest_at = 0.0
        """When the oldest queued batch was queued."""
        self.batch_deltas_max = 1
        self.linger_s = 0.0
        self._batch_bytes_max = batch_bytes_max
        self._retry_at = -inf  # when the log is read again after a disk failure

    def start(self, request: Subscription) -> None:
        """Begin with the first subscription, which sets the size of batches."""
        self.batch_deltas_max = min(max(request.batch_deltas_max, 1), BATCH_DELTAS_MAX)
        self.linger_s = request.wait_ms_max / 1000
        self.state, self.has_just_sent = SendState.ACTIVE, False

    def enter(self, state: SendState) -> None:
        """Move to a state; an error if it cannot follow the present one."""
        assert state in MOVES[self.state], f"{state.value} cannot follow {self.state.value}"
        self.state = state

    def note_sent(self, now: float) -> None:
        """Note that a chunk was taken: the next batches may linger from now on."""
        self.has_just_sent, self.state, self.oldest_at = True, SendState.ACTIVE, now

    def note_drained(self) -> None:
        """Note that nothing is left: the next batch is sent at once."""
        self.state, self.has_just_sent = SendState.IDLE, False

    def note_disk_failed(self, now: float) -> bool:
        """Wait before the next read; return True if this is the first failure in a row."""
        is_first = self._retry_at == -inf
        self.enter(SendState.DISK_FAILING)
        self._retry_at = now + READ_RETRY_S
        return is_first

    def note_read(self) -> None:
        """Note that the log was read: an earlier disk failure has passed."""
        self._retry_at = -inf

    def is_full(self, queue: SendQueue) -> bool:
        """Return True if the queued batches need not linger for more."""
        return queue.delta_count >= self.batch_deltas_max or queue.bytes >= self._batch_bytes_max

    def may_linger(self, now: float) -> bool:
        """Return True if the time for which queued batches may linger has not passed."""
        return self.linger_s > 0 and now < self.oldest_at + self.linger_s

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until there may be something to send; None if the writer is notified of it."""
        if self.state is SendState.ACTIVE:
            return 0.0
        if self.state is SendState.LINGERING:
            return max(0.0, self.oldest_at + self.linger_s - now)
        return max(0.0, self._retry_at - now) if self.state is SendState.DISK_FAILING else None
