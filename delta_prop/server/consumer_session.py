"""A connection's read side of the log: one cursor; the rows after it that its subscriptions match are sent.

While the session keeps up, the pipeline pushes batches into its queue. While it lags, it reads them from the
log, as ranges of the log's files if no row has to be left out. A session has no task of its own and never
waits: the connection's writer takes the next chunk from it.
"""

from __future__ import annotations

import logging
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from delta_prop.delivery.routing_table import NO_ROWS, NoRows
from delta_prop.server.send_queue import BATCH_OVERHEAD_BYTES, SendChunk, SendQueue
from delta_prop.server.start_offsets import check_cursor, check_in_log, check_offset, resolve_start
from delta_prop.server.subscription_set import SubscriptionSet
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.segments.sendfile import RangeBounds
from delta_prop_wire.credit_window import CreditWindow
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import DeltaPropError, Refused
from delta_prop_wire.frames import Backpressure, Credit, PressureLevel, StartAt, Subscribed
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.api.internals import Internals
    from delta_prop.delivery.routing_table import Rows
    from delta_prop.server.groups import GroupAssignment, Groups
    from delta_prop.server.settings import ServerSettings
    from delta_prop_broker.segments.sendfile import SendfileRange
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.frames import Subscription

READ_FRAMES_MAX, READ_BYTES_MAX = 64, 1024 * 1024
"""Bounds of one read, which may exceed them a little; low, so that a read hardly delays other tasks."""
_READ_ROWS_MAX = 100
"""Maximum rows of one call of `Log.read`; one read makes several."""
SENDFILE_BYTES_MAX = 4 * 1024 * 1024
"""Maximum bytes sent from a file at once, provided that the slowest allowed client reads them in time."""
READ_RETRY_S = 0.5
"""Seconds after which the log is read again after a disk failure."""
BATCH_DELTAS_MAX = 10_000
"""Maximum of a subscription's `batch_deltas_max`; a higher one is reduced to it."""
WARN_FROM, THROTTLE_FROM = 0.8, 0.95
"""Shares of the log's retention from which on a lagging subscriber gets pressure WARN, then THROTTLE."""
_UNBOUNDED = Credit(1 << 62, 1 << 62)

NO_SUBSCRIPTION = {"processed": None, "catching_up": False, "group": None, "standing_by": False}
"""`ConsumerSession.statistics` of a connection without a session."""

logger = logging.getLogger("delta_prop.server")


class _SendState(Enum):
    """The result of the last `take`, which decides the events that call `notify`."""

    ACTIVE = "active"  # there may be more to send
    IDLE = "idle"  # everything is sent
    LINGERING = "lingering"
    NO_CREDIT = "no credit"
    DISK_FAILING = "disk failing"


class ConsumerSession:
    """The consumer side of one connection. `take` returns the next chunk; if there is none, `wait_s` says
    when to call it again, and `notify` is called if it should be called sooner. Once `take` has raised, the
    session is closed.
    """

    def __init__(
        self,
        internals: Internals,
        *,
        settings: ServerSettings,
        codecs: frozenset[int],
        can_read: Callable[[str], bool] | None,
        notify: Callable[[], None],
        groups: Groups,
    ) -> None:
        """`codecs`: those of compressed frames that the client can read.

        `can_read`: returns True for a namespace that the client may read; None if it may read all.
        """
        self.is_catching_up = False
        """True while it reads the log, so that no batches are pushed into its queue."""
        self.group: str | None = None
        """The group that it is a member of."""
        self.standing_by = False
        """True while another member reads for the group: nothing is sent."""
        self._log = internals.partition.log
        self._sinks = internals.sinks
        self._now = internals.partition.world.clock.now
        self._settings = settings
        self._bytes_max = settings.subscriber_bytes_max
        slow_bytes = int(settings.send_timeout_s * settings.receive_rate_min)
        self._sendfile_bytes_max = max(settings.send_bytes_max, min(slow_bytes, SENDFILE_BYTES_MAX))
        self._codecs = codecs
        self._notify = notify
        self._groups = groups
        self._subscriptions = SubscriptionSet(can_read)
        # the first request sets the cursor, the group, the credit and the type of frames
        self._first_request: Subscription | None = None
        self._on_takeover: Callable[[Subscribed], None] | None = None  # called when it stops standing by
        self._resets = 0  # how often operators have reset the group's cursor
        self._sends_batches = False  # batches are sent unchanged, not as single deltas
        self._window = CreditWindow(None)
        self._batch_deltas_max, self._linger_s = 1, 0.0
        self._queue = SendQueue()
        self._next_offset = 0  # everything below is sent, queued, or matches no subscription
        self._state = _SendState.ACTIVE
        self._has_just_sent = False  # the next batches may linger
        self._oldest_at = 0.0  # when the oldest queued batch was queued
        self._sendfile_reader = internals.partition.log.sendfile_reader()
        self._has_open_file = False  # the file of the last range is open
        self._has_read = False  # the log has been read since the start, which verified the first frames
        self._retry_at = -inf  # when the log is read again after a disk failure
        self._refusal: Refused | None = None
        self._warning_number = 0

    # --- requests of the client

    def subscribe(
        self, request: Subscription, on_takeover: Callable[[Subscribed], None] | None = None
    ) -> Subscribed:
        """Add topics. The first request sets the cursor; later ones apply from its present position on.

        If the session stands by at first, `on_takeover` is called with a second answer once it reads for its
        group. Raises Refused (BAD_REQUEST, CURSOR_TOO_OLD, LOG_FAILED) and changes nothing.
        """
        if self._first_request is None:
            self._start(request)
            self._on_takeover = on_takeover
        else:
            self._check_later_request(request, self._first_request)
            self._subscriptions.add(request)
            self._reread_log()
            if request.credit is not None:
                self.grant(request.credit)
        self._sinks.add_target(self, self._subscriptions.topics)
        return self._make_answer(request)

    def unsubscribe(self, subscription: int) -> None:
        """Remove topics: rows that only they match are not sent any more. Raises Refused (BAD_REQUEST)."""
        self._subscriptions.remove(subscription)
        if len(self._subscriptions):
            self._reread_log()
            self._sinks.add_target(self, self._subscriptions.topics)
        else:
            self.close()

    def grant(self, credit: Credit) -> None:
        """Let `credit` more deltas and bytes be sent."""
        self._window.grant(credit)
        if self._state is _SendState.NO_CREDIT and self._window.is_open:
            self._wake()

    def note_processed(self, offset: int) -> None:
        """Commit the group's cursor: all below `offset` is processed. The cursor never passes sent rows."""
        if self.group is not None and not self.standing_by:
            self._groups.commit(self.group, min(offset, self.processed), self)

    def commit(self, cursor: Cursor) -> None:
        """Commit a cursor, which names its log. Raises Refused (BAD_REQUEST)."""
        if self.group is None:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                "a cursor is committed for a group, and this connection has none: name one in its first "
                "Subscribe",
            )
        self.note_processed(check_cursor(cursor, self._log))

    # --- progress

    @property
    def processed(self) -> int:
        """The offset below which each row is sent or not subscribed to; on standby, the group's cursor."""
        if self.standing_by:
            return self._next_offset
        if self._queue.waiting:
            return self._queue.first_offset
        return self._next_offset if self.is_catching_up else max(self._next_offset, self._log.high_watermark)

    def statistics(self) -> dict[str, Any]:
        """Return a snapshot, for people and their tools."""
        return {
            "processed": self.reported_offset,
            "catching_up": self.is_catching_up and not self.standing_by,
            "group": self.group,
            "standing_by": self.standing_by,
        }

    @property
    def reported_offset(self) -> int | None:
        """`processed`; None while it stands by."""
        return None if self.standing_by else self.processed

    def has_to_deliver(self, subscription: int) -> bool:
        """True if it has this subscription, and something is left to deliver."""
        return subscription in self._subscriptions and not (
            self.standing_by or self.processed >= self._log.high_watermark
        )

    @property
    def warning(self) -> Backpressure | None:
        """A warning for a client that lags so far that the log may soon drop the rows that it needs."""
        log, processed = self._log, self.processed
        lag = log.high_watermark - processed
        if lag <= 0 or self._first_request is None or self.standing_by:
            return None
        share = log.retention_share(processed)
        if share < WARN_FROM:
            return None
        self._warning_number += 1
        level = PressureLevel.WARN if share < THROTTLE_FROM else PressureLevel.THROTTLE
        return Backpressure(
            self._warning_number, level, depth=lag, capacity=log.next_offset - log.start_offset
        )

    # --- events of the service

    def offer(self, logged: LoggedBatch, rows: Rows) -> None:
        """Queue a batch that became visible; if the queue is full, the batch is read from the log later."""
        if self.is_catching_up:
            return
        selected = self._subscriptions.narrow(logged, rows) if self._subscriptions.is_narrowing else rows
        if logged.offset < self._next_offset:
            selected = _rows_from(selected, logged, self._next_offset)
        if isinstance(selected, NoRows):
            return
        queue = self._queue
        waiting = bool(queue.waiting)
        if waiting and queue.bytes + logged.batch.size + BATCH_OVERHEAD_BYTES > self._bytes_max:
            self.is_catching_up = True
        else:
            if self._has_just_sent and not waiting:
                self._oldest_at = self._now()
            queue.put(logged, selected)
            self._next_offset = logged.offset + logged.batch.count
        if self._state is _SendState.IDLE or (self._state is _SendState.LINGERING and self._is_batch_full()):
            self._state = _SendState.ACTIVE
            self._notify()

    def note_visible(self) -> None:
        """Do nothing: all matching rows were offered, and `processed` follows the high watermark."""

    def note_recovered(self) -> None:
        """Fence: the log was recovered in place, in another epoch, so this connection's cursors are invalid.

        The client reconnects with its cursor, and learns if what it got is still there.
        """
        self.fence(
            Refused(
                ErrorCode.SHUTTING_DOWN,
                f"the log was recovered after a disk failure, and is in epoch {self._log.epoch} now: "
                "reconnect, and resume from your cursor",
                retry_after_ms=50,
            )
        )

    def take_over(self, assignment: GroupAssignment) -> None:
        """Start reading for the group from its cursor: the former reader has left."""
        self.standing_by, self._resets = False, assignment.resets
        try:
            self._next_offset = check_offset(assignment.offset, self._log)
        except Refused as refused:
            self.fence(refused)
            return
        self.is_catching_up = self._must_catch_up()
        if self._on_takeover is not None and self._first_request is not None:
            self._on_takeover(self._make_answer(self._first_request))
        self._wake()

    def fence(self, refused: Refused) -> None:
        """Send nothing more; the next `take` raises the reason for the client."""
        self._refusal = self._refusal or refused
        self._queue.clear()
        self.is_catching_up = True
        self._leave_group()
        self._wake()

    # --- sending

    def take(self, now: float, bytes_max: int, *, rows_max: int | None = None) -> SendChunk | None:
        """Return the next chunk, of about `bytes_max`; None if there is none now.

        The previous chunk must be written. `rows_max`: the maximum number of rows, None if there is none; a
        batch with more is sliced.
        Raises Refused: CURSOR_TOO_OLD, FENCED, PROCESSING_FAILED (the next rows are corrupted) or
        SHUTTING_DOWN.
        """
        lingers = self._has_just_sent and self._linger_s
        if (
            self._sends_batches
            and rows_max is None
            and not (self.is_catching_up or self._has_open_file or lingers)
        ):
            chunk = self._queue.take_single(self._window)
            if chunk is not None:
                self._has_just_sent, self._state, self._oldest_at = True, _SendState.ACTIVE, now
                return chunk
        try:
            if self._refusal is not None:
                raise self._refusal
            chunk = self._take_next(now, bytes_max, rows_max)
        except (Refused, DeltaPropError) as error:
            self.close()
            raise _to_refusal(error) from None
        except OSError as error:
            if self._retry_at == -inf:
                logger.warning("the log cannot be read for a subscriber: %s: retrying", error)
            self._state, self._retry_at = _SendState.DISK_FAILING, now + READ_RETRY_S
            return None
        if chunk is not None:
            self._has_just_sent, self._state, self._oldest_at = True, _SendState.ACTIVE, now
        return chunk

    def try_idle(self) -> bool:
        """Become idle and return True if everything was taken, and so written.

        The next batch then calls `notify`, and is sent at once.
        """
        if self._refusal is not None or (
            not self.standing_by and (self._queue.waiting or self.is_catching_up)
        ):
            return False
        self._state, self._has_just_sent = _SendState.IDLE, False
        if self._has_open_file:
            self._release_file()
        return True

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until there may be something to send; None if `notify` will report it."""
        if self._state is _SendState.ACTIVE:
            return 0.0
        if self._state is _SendState.LINGERING:
            return max(0.0, self._oldest_at + self._linger_s - now)
        return max(0.0, self._retry_at - now) if self._state is _SendState.DISK_FAILING else None

    def close(self) -> None:
        """Release everything: the connection has closed, or its last subscription has ended."""
        self._sinks.remove_target(self)
        self._leave_group()
        self._subscriptions.clear()
        self._queue.clear()
        self._first_request, self._on_takeover, self.is_catching_up = None, None, False
        self._release_file()

    # --- helpers: subscribing

    def _start(self, request: Subscription) -> None:
        self._subscriptions.add(request)
        try:
            first_offset = self._resolve_first_offset(request)
        except BaseException as error:
            self._subscriptions.clear()
            self._leave_group()
            if isinstance(error, OSError | DeltaPropError):
                raise _to_refusal(error) from None
            raise
        self._first_request, self._next_offset = request, first_offset
        self._batch_deltas_max = min(max(request.batch_deltas_max, 1), BATCH_DELTAS_MAX)
        self._linger_s = request.wait_ms_max / 1000
        self._sends_batches = not request.deltas
        self._window.reset(request.credit)
        self._queue.clear()
        self.is_catching_up = self._must_catch_up()
        self._state, self._has_just_sent, self._has_read = _SendState.ACTIVE, False, False

    def _resolve_first_offset(self, request: Subscription) -> int:
        """Return the first offset: the group's cursor; without a group or for a new one, the start."""
        start, log, group = request.start, self._log, request.group
        if group is None:
            if start.kind is StartAt.GROUP:
                raise Refused(ErrorCode.BAD_REQUEST, "start at group: no group is named: name one")
            return resolve_start(start, log)
        if isinstance(start.value, Cursor):  # a cursor of another log, or of a lost tail, is always refused
            check_cursor(start.value, log)

        def first_offset_of_new_group() -> int:
            return log.start_offset if start.kind is StartAt.GROUP else resolve_start(start, log)

        joined = self._groups.join(group, self, first_offset_of_new_group, member_id=request.member)
        self.group, self.standing_by, self._resets = group, joined.is_standby, joined.resets
        return joined.offset if joined.is_standby else check_offset(joined.offset, log)

    def _make_answer(self, request: Subscription) -> Subscribed:
        first = self._first_request
        assert first is not None
        is_of_group = first.group is not None and request.subscription == first.subscription
        return Subscribed(
            request.subscription,
            Cursor(self._log.log_id, self._log.epoch, self._next_offset),
            self._batch_deltas_max,
            first.wait_ms_max,
            standby=is_of_group and self.standing_by,
            resets=self._resets if is_of_group else 0,
        )

    def _check_later_request(self, request: Subscription, first: Subscription) -> None:
        conflicts = {
            "start": request.start != first.start and request.start.kind is not StartAt.LATEST,
            "group": request.group not in (None, first.group),
            "deltas": request.deltas and not first.deltas,
            "credit": request.credit is not None and first.credit is None,
        }
        conflicting = [name for name, differs in conflicts.items() if differs]
        if conflicting:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"a connection has one cursor, and its first Subscribe ({first.subscription}) has set its "
                f"start, group, credit and type of frames: leave out {', '.join(conflicting)}, or use "
                "another connection",
                field=conflicting[0],
            )

    def _reread_log(self) -> None:
        """Read the queued rows from the log again: they were selected for the former topics."""
        if self.standing_by:
            return
        self._next_offset = self.processed
        self._queue.clear()
        self.is_catching_up = self._must_catch_up()
        self._wake()

    def _must_catch_up(self) -> bool:
        """Return True if it must read the log.

        It must without credit, too: so its position stays, and topics that are added later start there.
        """
        return self.standing_by or self._next_offset < self._log.high_watermark or not self._window.is_open

    def _leave_group(self) -> None:
        if self.group is not None:
            self._groups.leave(self.group, self)
            self.group, self.standing_by = None, False

    # --- helpers: sending

    def _wake(self) -> None:
        self._state = _SendState.ACTIVE
        self._notify()

    def _is_batch_full(self) -> bool:
        queue = self._queue
        return (
            self.is_catching_up
            or queue.delta_count >= self._batch_deltas_max
            or queue.bytes >= self._settings.send_bytes_max
        )

    def _take_next(self, now: float, bytes_max: int, rows_max: int | None) -> SendChunk | None:
        first, waiting = self._first_request, self._queue.waiting
        if self._has_open_file and not self.is_catching_up:
            self._release_file()
        if first is None or self.standing_by or not (waiting or self.is_catching_up):
            self._state, self._has_just_sent = _SendState.IDLE, False
            return None
        if not self._window.is_open:
            self._state = _SendState.NO_CREDIT
            return None
        if waiting and self._has_just_sent and self._is_lingering(now):
            self._state = _SendState.LINGERING
            return None
        self._state = _SendState.ACTIVE
        if not waiting:
            file_range = self._next_sendfile_range(rows_max)
            if file_range is not None:
                return self._make_file_chunk(file_range)
            self._read_log()
        if not waiting:
            return None
        return self._queue.take(self._window, bytes_max, as_deltas=first.deltas, rows_max=rows_max)

    def _release_file(self) -> None:
        self._has_open_file = False
        if self._sendfile_reader is not None:
            self._sendfile_reader.close()

    def _is_lingering(self, now: float) -> bool:
        """Return True if the queued batches may linger for more."""
        linger_s = self._linger_s
        return linger_s > 0 and now < self._oldest_at + linger_s and not self._is_batch_full()

    def _read_log(self) -> None:
        """Queue the next rows of the log; once its end is reached, batches are pushed again."""
        log, offset = self._log, check_in_log(self._next_offset, self._log)
        frames, bytes_left = 0, min(READ_BYTES_MAX, self._settings.subscriber_bytes_max)
        while frames < READ_FRAMES_MAX and bytes_left > 0:
            try:
                batches = log.read(offset, rows_max=_READ_ROWS_MAX, bytes_max=bytes_left)
            except (DeltaPropError, OSError):
                if frames:  # the frames before the fault are sent first
                    break
                raise
            for logged in batches:
                rows = self._subscriptions.rows(logged)
                if logged.offset < offset:
                    rows = _rows_from(rows, logged, offset)
                if not isinstance(rows, NoRows):
                    self._queue.put(logged, rows)
                bytes_left -= logged.batch.size + BATCH_OVERHEAD_BYTES
            if not batches:
                break
            frames += len(batches)
            offset = self._next_offset = batches[-1].next_offset
        self._has_read, self._retry_at = True, -inf
        # No await between this comparison and the flag, so every later append is offered.
        self.is_catching_up = self._next_offset < log.high_watermark

    def _next_sendfile_range(self, rows_max: int | None) -> SendfileRange | None:
        """Return a range of complete frames in the log's files; None if there is none, or rows are left out.

        The first frames after a start are verified, since a client that found corruption resumes there.
        """
        first = self._first_request
        if self._sendfile_reader is None or not self._subscriptions.wants_all:
            return None
        assert first is not None
        if first.deltas:
            return None
        credit_rows, bytes_max = self._window.remaining or _UNBOUNDED
        bytes_max = min(bytes_max, self._sendfile_bytes_max)
        rows_max = credit_rows if rows_max is None else min(credit_rows, rows_max)
        bounds = RangeBounds(
            rows_max, bytes_max, read_bytes_max=self._settings.send_bytes_max, verified=not self._has_read
        )
        self._has_open_file = True
        try:
            return self._sendfile_reader.next(self._next_offset, bounds, codecs=self._codecs)
        except (LogCorrupted, OSError):
            return None  # a read reports the fault, if it is at this subscriber's cursor

    def _make_file_chunk(self, file_range: SendfileRange) -> SendChunk:
        parts, delta_count, size, self._next_offset = file_range
        self._window.spend(delta_count, size)
        self.is_catching_up = self._next_offset < self._log.high_watermark
        return SendChunk(parts, delta_count, size, self._next_offset)


def _rows_from(rows: Rows | NoRows, logged: LoggedBatch, offset: int) -> Rows | NoRows:
    """Return the given rows of a batch from `offset` on."""
    if isinstance(rows, NoRows) or offset >= logged.next_offset:
        return NO_ROWS
    rows = np.arange(logged.count) if rows is None else rows
    rows = rows[rows >= offset - logged.offset]
    return rows if len(rows) else NO_ROWS


def _to_refusal(error: OSError | DeltaPropError) -> Refused:
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
