"""A connection's read side of the log: one cursor; the rows after it that its subscriptions match are sent.

While the session keeps up, the pipeline pushes batches into its queue. While it lags, it reads them from the
log, as ranges of the log's files if no row has to be left out. A session has no task of its own and never
waits: the connection's writer takes the next chunk from it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from delta_prop.delivery.backpressure.advice import Advice
from delta_prop.delivery.routing_table import NoRows, Rows
from delta_prop.server.groups import GroupAssignment, GroupMembership, Groups
from delta_prop.server.log_reader import LogReader, rows_from, to_refusal
from delta_prop.server.partition_checks import check_acked, check_stream_rights, resolve_partition
from delta_prop.server.permissions import Unauthorized
from delta_prop.server.send_queue import BATCH_OVERHEAD_BYTES, SendChunk, SendQueue, SendState, SendTiming
from delta_prop.server.start_offsets import check_cursor, check_offset
from delta_prop.server.subscription_set import SubscriptionSet
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.credit_window import CreditWindow
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import DeltaPropError, Refused
from delta_prop_wire.frames import (
    Ack,
    Backpressure,
    Credit,
    Heartbeat,
    PressureLevel,
    StartAt,
    Subscribed,
    Subscription,
    Unsubscribe,
)
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import LogName

if TYPE_CHECKING:
    from delta_prop.delivery.sink_manager import SinkManager
    from delta_prop.partition.partition import Partition
    from delta_prop.platform.ports import Clock
    from delta_prop.server.answers import Answers, ConnectedClient
    from delta_prop.server.connection_writer import ConnectionWriter
    from delta_prop.server.server_context import ServerContext
    from delta_prop.server.settings import ServerSettings

NO_SUBSCRIPTION = {"processed": None, "catching_up": False, "group": None, "standing_by": False}
"""`ConsumerSession.statistics` of a connection without a session."""

PROGRESS_INTERVAL_S = 1.0

logger = logging.getLogger("delta_prop.server")


class ConsumerSession:
    """The consumer side of one connection. `take` returns the next chunk; if there is none, `wait_s` says
    when to call it again, and the writer is notified if it should be called sooner. Once `take` has raised,
    the session is closed.
    """

    def __init__(
        self,
        partition: Partition,
        sinks: SinkManager,
        groups: Groups,
        *,
        settings: ServerSettings,
        client: ConnectedClient,
        writer: ConnectionWriter,
    ) -> None:
        self._sinks = sinks
        self._notify = writer.notify
        self._reader = LogReader(partition.log, settings, client.codecs)
        self._timing = SendTiming(partition.world.clock, batch_bytes_max=settings.send_bytes_max)
        self._membership = GroupMembership(groups, self)
        self._subscriptions = SubscriptionSet(client.rights)
        self._queue = SendQueue(settings.subscriber_bytes_max)
        self._window = CreditWindow(None)
        # the first request sets the cursor, the group, the credit and the type of frames
        self._first_request: Subscription | None = None
        self._on_takeover: Callable[[Subscribed], None] | None = None  # called when it stops standing by
        self._sends_batches = False  # batches are sent unchanged, not as single deltas
        self._refusal: Refused | None = None

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
            self._end()  # the file of a chunk that is being written stays open: `try_idle` closes it

    def grant(self, credit: Credit) -> None:
        """Let `credit` more deltas and bytes be sent."""
        self._window.grant(credit)
        if self._timing.state is SendState.NO_CREDIT and self._window.is_open:
            self._wake()

    def note_processed(self, offset: int) -> None:
        """Commit the group's cursor: all below `offset` is processed. The cursor never passes sent rows."""
        if self.group is not None:
            self._membership.commit(min(offset, self.processed))

    def commit(self, cursor: Cursor) -> None:
        """Commit a cursor, which names its log. Raises Refused (BAD_REQUEST)."""
        if self.group is None:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                "a cursor is committed for a group, and this connection has none: name one in its first "
                "Subscribe",
            )
        self.note_processed(check_cursor(cursor, self._reader.log))

    # --- progress

    @property
    def group(self) -> str | None:
        """The group that it is a member of."""
        return self._membership.group

    @property
    def standing_by(self) -> bool:
        """True while another member reads for the group: nothing is sent."""
        return self._membership.standing_by

    @property
    def is_catching_up(self) -> bool:
        """True while it reads the log, so that no batches are pushed into its queue."""
        return self._reader.is_catching_up

    @property
    def processed(self) -> int:
        """The offset below which each row is sent or not subscribed to; on standby, the group's cursor."""
        reader = self._reader
        if self._membership.standing_by:
            return reader.next_offset
        if self._queue.waiting:
            return self._queue.first_offset
        if reader.is_catching_up:
            return reader.next_offset
        return max(reader.next_offset, reader.log.high_watermark)

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
            self.standing_by or self.processed >= self._reader.log.high_watermark
        )

    @property
    def warning(self) -> Backpressure | None:
        """A warning for a client that lags so far that the log may soon drop the rows that it needs."""
        if self._first_request is None or self.standing_by:
            return None
        return self._reader.warning(self.processed)

    # --- events of the service

    def offer(self, logged: LoggedBatch, rows: Rows) -> None:
        """Queue a batch that became visible; if the queue is full, the batch is read from the log later."""
        reader = self._reader
        if reader.is_catching_up:
            return
        selected = self._subscriptions.narrow(logged, rows) if self._subscriptions.is_narrowing else rows
        if logged.offset < reader.next_offset:
            selected = rows_from(selected, logged, reader.next_offset)
        if isinstance(selected, NoRows):
            return
        queue, timing = self._queue, self._timing
        waiting = bool(queue.waiting)
        if waiting and queue.bytes + logged.batch.size + BATCH_OVERHEAD_BYTES > queue.bytes_max:
            reader.is_catching_up = True
        else:
            if timing.has_just_sent and not waiting:
                timing.oldest_at = timing.now()
            queue.put(logged, selected)
            reader.next_offset = logged.offset + logged.batch.count
        state = timing.state
        if state is SendState.IDLE or (state is SendState.LINGERING and self._is_batch_full()):
            timing.state = SendState.ACTIVE
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
                f"the log was recovered after a disk failure, and is in epoch {self._reader.log.epoch} now: "
                "reconnect, and resume from your cursor",
                retry_after_ms=50,
            )
        )

    def take_over(self, assignment: GroupAssignment) -> None:
        """Start reading for the group from its cursor: the former reader has left."""
        self._membership.take_over(assignment)
        try:
            self._reader.next_offset = check_offset(assignment.offset, self._reader.log)
        except Refused as refused:
            self.fence(refused)
            return
        self._reader.is_catching_up = self._must_catch_up()
        if self._on_takeover is not None and self._first_request is not None:
            self._on_takeover(self._make_answer(self._first_request))
        self._wake()

    def fence(self, refused: Refused) -> None:
        """Send nothing more; the next `take` raises the reason for the client."""
        self._refusal = self._refusal or refused
        self._queue.clear()
        self._reader.is_catching_up = True
        self._membership.leave()
        self._wake()

    # --- sending

    def take(
        self, now: float, bytes_max: int, *, rows_max: int | None = None, budget: Credit | None = None
    ) -> SendChunk | None:
        """Return the next chunk, of about `bytes_max`; None if there is none now.

        The previous chunk must be written. `rows_max`: the maximum number of rows, None if there is none; a
        batch with more is sliced. `budget`: as a credit that holds for this chunk alone, besides the
        client's.
        Raises Refused: CURSOR_TOO_OLD, FENCED, PROCESSING_FAILED (the next rows are corrupted) or
        SHUTTING_DOWN.
        """
        timing, reader = self._timing, self._reader
        window = self._window if budget is None else self._window.bounded(budget)
        if (
            self._sends_batches
            and rows_max is None
            and not (
                reader.is_catching_up or reader.has_open_file or (timing.has_just_sent and timing.linger_s)
            )
        ):
            chunk = self._queue.take_single(window)
            if chunk is not None:
                if budget is not None:
                    self._window.spend(chunk.delta_count, chunk.bytes)
                timing.has_just_sent, timing.state, timing.oldest_at = True, SendState.ACTIVE, now
                return chunk
        try:
            if self._refusal is not None:
                raise self._refusal
            chunk = self._take_next(now, bytes_max, rows_max, window)
        except (Refused, DeltaPropError) as error:
            self.close()
            raise to_refusal(error) from None
        except OSError as error:
            if timing.note_disk_failed(now):
                logger.warning("the log cannot be read for a subscriber: %s: retrying", error)
            return None
        if chunk is not None:
            if budget is not None:
                self._window.spend(chunk.delta_count, chunk.bytes)
            timing.note_sent(now)
        return chunk

    def try_idle(self) -> bool:
        """Become idle and return True if everything was taken, and so written.

        The next batch then notifies the writer, and is sent at once.
        """
        reader, timing = self._reader, self._timing
        if self._refusal is not None or (
            not self._membership.standing_by and (self._queue.waiting or reader.is_catching_up)
        ):
            return False
        timing.state, timing.has_just_sent = SendState.IDLE, False
        if reader.has_open_file:
            reader.close_file()
        return True

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until there may be something to send; None if the writer is notified of it."""
        return self._timing.wait_s(now)

    def close(self) -> None:
        """Release everything: the connection has closed."""
        self._end()
        self._reader.close_file()

    def _end(self) -> None:
        self._sinks.remove_target(self)
        self._membership.leave()
        self._subscriptions.clear()
        self._queue.clear()
        self._first_request, self._on_takeover, self._reader.is_catching_up = None, None, False

    # --- helpers: subscribing

    def _start(self, request: Subscription) -> None:
        self._subscriptions.add(request)
        try:
            first_offset = self._membership.resolve_start(request, self._reader.log)
        except BaseException as error:
            self._subscriptions.clear()
            self._membership.leave()
            if isinstance(error, OSError | DeltaPropError):
                raise to_refusal(error) from None
            raise
        self._first_request = request
        self._sends_batches = not request.deltas
        self._window.reset(request.credit)
        self._queue.clear()
        self._reader.start(first_offset)
        self._reader.is_catching_up = self._must_catch_up()
        self._timing.start(request)

    def _make_answer(self, request: Subscription) -> Subscribed:
        first, membership, log = self._first_request, self._membership, self._reader.log
        assert first is not None
        is_of_group = first.group is not None and request.subscription == first.subscription
        return Subscribed(
            request.subscription,
            Cursor(log.log_id, log.epoch, self._reader.next_offset),
            self._timing.batch_deltas_max,
            first.wait_ms_max,
            standby=is_of_group and membership.standing_by,
            resets=membership.resets if is_of_group else 0,
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
        self._reader.next_offset = self.processed
        self._queue.clear()
        self._reader.is_catching_up = self._must_catch_up()
        self._wake()

    def _must_catch_up(self) -> bool:
        """Return True if it must read the log.

        It must without credit, too: so its position stays, and topics that are added later start there.
        """
        reader = self._reader
        return self.standing_by or reader.next_offset < reader.log.high_watermark or not self._window.is_open

    # --- helpers: sending

    def _wake(self) -> None:
        self._timing.state = SendState.ACTIVE
        self._notify()

    def _is_batch_full(self) -> bool:
        return self._reader.is_catching_up or self._timing.is_full(self._queue)

    def _take_next(
        self, now: float, bytes_max: int, rows_max: int | None, window: CreditWindow
    ) -> SendChunk | None:
        first, waiting = self._first_request, self._queue.waiting
        reader, timing = self._reader, self._timing
        if reader.has_open_file and not reader.is_catching_up:
            reader.close_file()
        if first is None or self.standing_by or not (waiting or reader.is_catching_up):
            timing.note_drained()
            return None
        if not self._window.is_open:
            timing.enter(SendState.NO_CREDIT)
            return None
        if waiting and timing.has_just_sent and timing.may_linger(now) and not self._is_batch_full():
            timing.enter(SendState.LINGERING)
            return None
        timing.state = SendState.ACTIVE
        if not waiting:
            if self._subscriptions.wants_all and not first.deltas:
                chunk = reader.next_range(window, rows_max)
                if chunk is not None:
                    return chunk
            reader.read(self._queue, self._subscriptions)
            timing.note_read()
        if not waiting:
            return None
        return self._queue.take(window, bytes_max, as_deltas=first.deltas, rows_max=rows_max)


class ConsumeHandler:
    """The deliveries of one connection. `session`: None while it has no subscription."""

    def __init__(self, context: ServerContext, client: ConnectedClient, answers: Answers) -> None:
        self.session: ConsumerSession | None = None
        self.pending_unsubscribes: deque[tuple[int, Unsubscribe]] = deque()
        """Each is handled once everything below its offset is delivered."""
        self._context = context
        self._client = client
        self._answers = answers
        self._advice = Advice()  # from the client: how fast to deliver
        self._progress_sent = (0, 0.0)  # the last progress report: offset, time
        self._sent_level = PressureLevel.OK

    def close(self) -> None:
        """End the session: the connection has closed."""
        if self.session is not None:
            self.session.close()
            self.session = None
        if self._client.quota.outbound is not None:
            self._client.quota.outbound.close(self._context.clock.now())

    # --- frames of the client

    def handle_subscribe(self, sequence: int, request: Subscription) -> None:
        """Open a subscription in the partition of the connection. Raises Refused."""
        context, session = self._context, self.session
        rights, catalogue = self._client.rights, context.partitions.streams.catalogue
        rights.check_stream(context.served.stream)
        named_streams = [request.stream] if request.partitions or request.stream else ()
        check_stream_rights(rights, named_streams, catalogue)
        rights.check_subscribe(request.topics)
        request = resolve_partition(request, catalogue, context.served.name)
        if session is None:
            session = ConsumerSession(
                context.partition,
                context.served.sinks,
                context.served.groups,
                settings=context.settings,
                client=self._client,
                writer=self._answers.writer,
            )
        try:
            granted = session.subscribe(request, partial(self._answers.respond, sequence))
        except Refused:
            if self.session is None:
                session.close()
            raise
        self.session = session
        self._answers.respond(sequence, granted)

    def handle_unsubscribe(self, frame: Unsubscribe) -> None:
        """End a subscription, now or once all that is visible is delivered."""
        try:
            self._client.rights.check_subscribe(())
        except Unauthorized as refused:
            self._answers.refuse_unauthorized(refused, "Unsubscribe", correlation_id=frame.sequence)
            return
        session = self.session
        if frame.drain and session is not None and session.has_to_deliver(frame.subscription):
            self.pending_unsubscribes.append((self._context.partition.log.high_watermark, frame))
        else:
            self._end_subscription(frame)

    def handle_ack(self, ack: Ack) -> None:
        """Take credit, progress and a cursor from the client."""
        if not self._client.rights.subscribe:
            self._answers.refuse_unauthorized(Unauthorized("the token may not subscribe"), "Ack")
        session = self.session
        if session is None:
            return
        try:
            check_acked(LogName(ack.stream, ack.partition), self._context.served.name)
            if ack.credit is not None:
                session.grant(ack.credit)
            if ack.processed is not None:
                session.note_processed(ack.processed)
            if ack.cursor is not None:
                session.commit(ack.cursor)
        except Refused as refused:
            self._answers.refuse(refused)

    def follow(self, advice: Backpressure, now: float) -> None:
        """Deliver at the pace that the client advises."""
        self._advice.update(advice, now)
        self._answers.writer.notify()  # deliveries that backpressure held up may go now

    # --- deliveries

    def next_chunk(self, now: float) -> SendChunk | None:
        """Return the next chunk to deliver; None if there is none now."""
        if self.pending_unsubscribes:
            self._end_drained_subscriptions()
        session, advice, quota = self.session, self._advice, self._client.quota.outbound
        if session is None or advice.wait_s(now) > 0:
            return None
        rows_max, budget = advice.rows_max, None
        if quota is not None:
            budget = quota.budget(now)
            if budget is None:
                return None
            if quota.limits_rows:
                rows_max = budget.deltas if rows_max is None else min(rows_max, budget.deltas)
        chunk = None
        try:
            chunk = session.take(now, self._context.settings.send_bytes_max, rows_max=rows_max, budget=budget)
        except Refused as refused:
            self._answers.refuse(refused)
            session.close()
            self.session = None
            self._end_drained_subscriptions()
        if quota is not None:
            quota.settle(chunk, now)
        if chunk is not None:
            advice.spend(chunk.delta_count, now)
        return chunk

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until there may be more to deliver; None if the writer is notified of it."""
        if self.session is None:
            return None
        quota = self._client.quota.outbound
        held_s = self._advice.wait_s(now) or (0.0 if quota is None else quota.wait_s(now))
        return held_s or self.session.wait_s(now)

    def has_delivered(self, offset: float) -> bool:
        """Return True if nothing below `offset` is left to deliver."""
        session = self.session
        return session is None or session.standing_by or session.processed >= offset

    def send_progress(self, now: float) -> None:
        """Report progress and lag, if they have changed."""
        session = self.session
        if session is None or session.standing_by:
            return
        reported, reported_at = self._progress_sent
        if session.processed > reported and now - reported_at >= PROGRESS_INTERVAL_S:
            self._progress_sent = (session.processed, now)
            self._answers.send(Ack(0, processed=session.processed))
        warning = session.warning
        level = PressureLevel.OK if warning is None else warning.level
        if level != self._sent_level:
            self._sent_level = level
            pressure = self._context.served.pressure
            self._answers.send(warning or Backpressure(pressure.next_number(), PressureLevel.OK))

    # --- helpers

    def _end_subscription(self, frame: Unsubscribe) -> None:
        try:
            if self.session is None:
                text = f"subscription {frame.subscription}: not open on this connection: name an open one"
                raise Refused(ErrorCode.BAD_REQUEST, text)
            processed = self.session.processed  # of all topics subscribed to until now
            self.session.unsubscribe(frame.subscription)
        except Refused as refused:
            self._answers.refuse(refused, correlation_id=frame.sequence)
        else:
            self._answers.send(Ack(0, correlation_id=frame.sequence, processed=processed))

    def _end_drained_subscriptions(self) -> None:
        """End the subscriptions whose last delivery is written."""
        pending = self.pending_unsubscribes
        while pending and self.has_delivered(pending[0][0]):
            self._end_subscription(pending.popleft()[1])


class Heartbeats:
    """Sends and receives heartbeats; with them, the progress of deliveries."""

    def __init__(self, clock: Clock, answers: Answers, deliveries: ConsumeHandler) -> None:
        self._clock = clock
        self._answers = answers
        self._deliveries = deliveries
        self._count = 0
        self._echo_us: int | None = None  # the time in the client's last heartbeat

    def receive(self, frame: Heartbeat) -> None:
        """Answer a heartbeat of the client that asks for it, and note what the client has processed."""
        self._echo_us = frame.sent_us
        if frame.sent_us is not None:
            self.send(self._clock.now())
        session = self._deliveries.session
        if frame.processed is not None and session is not None:
            session.note_processed(frame.processed)

    def send(self, now: float) -> None:
        """Send a heartbeat."""
        self._count += 1
        session = self._deliveries.session
        processed = None if session is None else session.reported_offset
        self._answers.send(Heartbeat(self._count, int(now * 1_000_000), self._echo_us, processed=processed))
        self._answers.writer.written_at = now
