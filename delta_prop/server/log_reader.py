"""A consumer session's position in the log, and its reads from there: as batches, or as ranges of files."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from delta_prop.delivery.routing_table import NO_ROWS, NoRows, Rows
from delta_prop.server.send_queue import BATCH_OVERHEAD_BYTES, SendChunk, SendQueue
from delta_prop.server.start_offsets import check_in_log
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.segments.sendfile import RangeBounds
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.errors import DeltaPropError, Refused
from delta_prop_wire.frames import Backpressure, Credit, PressureLevel
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.server.settings import ServerSettings
    from delta_prop.server.subscription_set import SubscriptionSet
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.credit_window import CreditWindow

READ_FRAMES_MAX, READ_BYTES_MAX = 64, 1024 * 1024
"""Bounds of one read, which may exceed them a little; low, so that a read hardly delays other tasks."""
_READ_ROWS_MAX = 100
"""Maximum rows of one call of `Log.read`; one read makes several."""
SENDFILE_BYTES_MAX = 4 * 1024 * 1024
"""Maximum bytes sent from a file at once, provided that the slowest allowed client reads them in time."""
WARN_FROM, THROTTLE_FROM = 0.8, 0.95
"""Shares of the log's retention from which on a lagging subscriber gets pressure WARN, then THROTTLE."""
_UNBOUNDED = Credit(1 << 62, 1 << 62)

logger = logging.getLogger("delta_prop.server")


class LogReader:
    """A position in the log. `next_offset`: everything below it is sent, queued, or matches no subscription.

    Call `close_file` when it has nothing to read for now.
    """

    def __init__(self, log: Log, settings: ServerSettings, codecs: frozenset[int]) -> None:
        """`codecs`: those of compressed frames that the client can read."""
        self.log = log
        self.next_offset = 0
        self.is_catching_up = False
        """True while rows are read from the log, so that no batches are pushed into the session's queue."""
        self.has_open_file = False
        """True while the file of the last range is open."""
        self._settings = settings
        slow_bytes = int(settings.send_timeout_s * settings.receive_rate_min)
        self._sendfile_bytes_max = max(settings.send_bytes_max, min(slow_bytes, SENDFILE_BYTES_MAX))
        self._codecs = codecs
        self._sendfile_reader = log.sendfile_reader()
        self._has_read = False  # the log has been read since the start, which verified the first frames
        self._warning_number = 0

    def start(self, offset: int) -> None:
        """Begin at an offset."""
        self.next_offset, self._has_read = offset, False

    def read(self, queue: SendQueue, subscriptions: SubscriptionSet) -> None:
        """Queue the next rows of the log; once its end is reached, batches are pushed again.

        Raises Refused, DeltaPropError, OSError.
        """
        log, offset = self.log, check_in_log(self.next_offset, self.log)
        frames, bytes_left = 0, min(READ_BYTES_MAX, self._settings.subscriber_bytes_max)
        while frames < READ_FRAMES_MAX and bytes_left > 0:
            try:
                batches = log.read(offset, rows_max=_READ_ROWS_MAX, bytes_max=bytes_left)
            except (DeltaPropError, OSError):
                if frames:  # the frames before the fault are sent first
                    break
                raise
            for logged in batches:
                rows = subscriptions.rows(logged)
                if logged.offset < offset:
                    rows = rows_from(rows, logged, offset)
                if not isinstance(rows, NoRows):
                    queue.put(logged, rows)
                bytes_left -= logged.batch.size + BATCH_OVERHEAD_BYTES
            if not batches:
                break
            frames += len(batches)
            offset = self.next_offset = batches[-1].next_offset
        self._has_read = True
        # No await between this comparison and the flag, so every later append is offered.
        self.is_catching_up = self.next_offset < log.high_watermark

    def next_range(self, window: CreditWindow, rows_max: int | None) -> SendChunk | None:
        """Return a range of complete frames in the log's files, if there is one, as the window allows.

        The first frames after a start are verified, since a client that found corruption resumes there.
        """
        if self._sendfile_reader is None:
            return None
        credit_rows, bytes_max = window.remaining or _UNBOUNDED
        bytes_max = min(bytes_max, self._sendfile_bytes_max)
        rows_max = credit_rows if rows_max is None else min(credit_rows, rows_max)
        bounds = RangeBounds(
            rows_max, bytes_max, read_bytes_max=self._settings.send_bytes_max, verified=not self._has_read
        )
        self.has_open_file = True
        try:
            file_range = self._sendfile_reader.next(self.next_offset, bounds, codecs=self._codecs)
        except (LogCorrupted, OSError):
            return None  # a read reports the fault, if it is at this subscriber's cursor
        if file_range is None:
            return None
        parts, delta_count, size, self.next_offset = file_range
        window.spend(delta_count, size)
        self.is_catching_up = self.next_offset < self.log.high_watermark
        return SendChunk(parts, delta_count, size, self.next_offset)

    def close_file(self) -> None:
        """Close the file of the last range."""
        self.has_open_file = False
        if self._sendfile_reader is not None:
            self._sendfile_reader.close()

    def warning(self, processed: int) -> Backpressure | None:
        """Return a warning if the log may soon drop rows that a client needs, which lags at `processed`."""
        log = self.log
        lag = log.high_watermark - processed
        if lag <= 0:
            return None
        share = log.retention_share(processed)
        if share < WARN_FROM:
            return None
        self._warning_number += 1
        level = PressureLevel.WARN if share < THROTTLE_FROM else PressureLevel.THROTTLE
        return Backpressure(
            self._warning_number, level, depth=lag, capacity=log.next_offset - log.start_offset
        )


def to_refusal(error: OSError | DeltaPropError) -> Refused:
    """Return the refusal for a subscriber whose log cannot be read."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, OSError) and not isinstance(error, DeltaPropError):
        return Refused(
            ErrorCode.LOG_FAILED,
            f"the log cannot be read: the disk fails with {error}: try again",
            retry_after_ms=1_000,
        )
    logger.error("the next rows cannot be sent to a subscriber: %s", error)
    return Refused(
        ErrorCode.PROCESSING_FAILED,
        f"the next rows cannot be sent: {error}: report it to the operator, or start after them",
    )


def rows_from(rows: Rows | NoRows, logged: LoggedBatch, offset: int) -> Rows | NoRows:
    """Return the given rows of a batch from `offset` on."""
    if isinstance(rows, NoRows) or offset >= logged.next_offset:
        return NO_ROWS
    rows = np.arange(logged.count) if rows is None else rows
    rows = rows[rows >= offset - logged.offset]
    return rows if len(rows) else NO_ROWS
