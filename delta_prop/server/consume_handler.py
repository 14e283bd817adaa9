"""A connection's read path: its subscriptions and their progress, and the pace that the client asks for."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from delta_prop.delivery.backpressure.advice import Advice
from delta_prop.server.consumer_session import ConsumerSession
from delta_prop.server.partitions import check_partition, resolve_partition
from delta_prop.server.permissions import Unauthorized
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Ack, Backpressure, PressureLevel
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.server.answers import Answers
    from delta_prop.server.connected_client import ConnectedClient
    from delta_prop.server.send_queue import SendChunk
    from delta_prop.server.server_context import ServerContext
    from delta_prop_wire.frames import Subscription, Unsubscribe

PROGRESS_INTERVAL_S = 1.0


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

    # --- frames of the client

    def handle_subscribe(self, sequence: int, request: Subscription) -> None:
        """Open a subscription. Raises Refused."""
        context, rights = self._context, self._client.rights
        rights.check_subscribe(request.topics)
        request = resolve_partition(request)
        session = self.session
        if session is None:
            session = ConsumerSession(
                context.partition,
                context.sinks,
                context.groups,
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
            check_partition(ack.stream, ack.partition)
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
        session, advice = self.session, self._advice
        if session is None or advice.wait_s(now) > 0:
            return None
        try:
            chunk = session.take(now, self._context.settings.send_bytes_max, rows_max=advice.rows_max)
        except Refused as refused:
            self._answers.refuse(refused)
            session.close()
            self.session = None
            self._end_drained_subscriptions()
            return None
        if chunk is not None:
            advice.spend(chunk.delta_count, now)
        return chunk

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until there may be more to deliver; None if the writer is notified of it."""
        if self.session is None:
            return None
        return self._advice.wait_s(now) or self.session.wait_s(now)

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
            pressure = self._context.pressure
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
