"""One connected client: the life of its connection, from its acceptance to its end.

A client can at worst end its own connection. The handler has two tasks, a reader and a writer; its memory is
bounded by the client's credit, the consumer session, and the answers that the client leaves unread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import anyio

from delta_prop.server.answers import (
    Answers,
    ConnectedClient,
    ConnectionEnd,
    RefusalLog,
    log_recovered,
    server_closing,
)
from delta_prop.server.connection_reader import ConnectionReader, FrameDispatcher
from delta_prop.server.connection_writer import ConnectionWriter
from delta_prop.server.consumer_session import NO_SUBSCRIPTION, ConsumeHandler, Heartbeats
from delta_prop.server.permissions import Unauthorized
from delta_prop_wire.connection import Connection
from delta_prop_wire.frames import Backpressure, Frame, Nack, PressureLevel
from delta_prop_wire.message_rules import Phase, Role

if TYPE_CHECKING:
    from delta_prop.platform.ports import Stream
    from delta_prop.server.server_context import ServerContext
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.stamp import LogName

logger = logging.getLogger("delta_prop.server")

_FINISH_TIMEOUT_S = 5.0


class ConnectionHandler:
    """An accepted connection. `run` serves it until it ends.

    `dispatcher` handles its frames, `deliveries` has its subscriptions.
    """

    def __init__(self, number: int, stream: Stream, context: ServerContext) -> None:
        self.started_at = context.clock.now()
        self.client = ConnectedClient(number, stream.peer)
        self.connection = Connection(Role.SERVER, payload_bytes_max=context.settings.frame_bytes_max)
        self._context = context
        self._stream = stream
        self._end = ConnectionEnd()
        client, connection = self.client, self.connection
        self._writer = ConnectionWriter(stream, connection, context, self)
        refusals = RefusalLog(client, context.counters, context.audit)
        answers = self._answers = Answers(self._writer, connection, refusals, anyio.CancelScope())
        self.deliveries = ConsumeHandler(context, client, answers)
        self._heartbeats = Heartbeats(context.clock, answers, self.deliveries)
        self.dispatcher = FrameDispatcher(
            context,
            client,
            connection,
            answers=answers,
            deliveries=self.deliveries,
            heartbeats=self._heartbeats,
            end=self._end,
        )
        self._reader = ConnectionReader(
            stream, connection, context, dispatcher=self.dispatcher, answers=answers
        )

    @property
    def partition_name(self) -> LogName:
        """The partition that the connection works with."""
        return self._context.served.name

    @property
    def log(self) -> Log:
        """The log of that partition."""
        return self._context.partition.log

    # --- running

    async def run(self) -> None:
        """Serve the connection until either side ends it."""
        end = self._end
        try:
            with self._answers.scope:
                async with anyio.create_task_group() as tasks:
                    self.dispatcher.queries.start(tasks)
                    tasks.start_soon(self._write_all)
                    await self._reader.run()
                    end.is_finishing = True
                    self._writer.notify()
                    tasks.cancel_scope.deadline = anyio.current_time() + _FINISH_TIMEOUT_S  # for the writer
        finally:
            # While the server drains, a subscriber may still be reading what was written.
            may_read = end.is_draining and self.deliveries.session is not None
            self.dispatcher.close()
            self.deliveries.close()
            self._reader.close()
            await self._stream.aclose(end.drain_until - self._context.clock.now() if may_read else 0.0)

    async def _write_all(self) -> None:
        try:
            await self._writer.run()
        except (ConnectionError, TimeoutError) as error:
            logger.info("connection %d of %s ends: %r", self.client.number, self.client.address, error)
        if not self._end.is_finishing:  # the reader waits for bytes; cancelling takes longer than returning
            self.abort()

    # --- ending

    def close(self, nack: Nack) -> None:
        """Send `nack` as the last frame, and end."""
        self._answers.close(nack)

    def abort(self) -> None:
        """End the connection at once."""
        self._answers.abort()

    def drain(self, until: float, log_end: float = inf) -> None:
        """Accept no more deltas; end once all are answered, and all rows below `log_end` are delivered."""
        end = self._end
        end.is_draining, end.drain_until, end.log_end = True, until, log_end
        self._writer.notify()

    # --- periodic checks

    def check(self, now: float, stalled_s: float) -> None:
        """Check timeouts and the token; send what is due. `stalled_s`: how long this server was stalled."""
        answers, client = self._answers, self.client
        if answers.writer.is_ending:
            return
        self._reader.received_at += stalled_s
        timeout_reason = self._timeout_reason(now)
        producer = self.dispatcher.produce_handler
        if timeout_reason is not None:
            logger.info("connection %d of %s ends: %s", client.number, client.address, timeout_reason)
            self._context.counters.connections_timed_out += 1
            answers.abort()
        elif producer is not None and producer.is_forwarder and self.dispatcher.is_outdated:
            # The forwarder reconnects and resends lost rows, even if it has no new ones for long.
            answers.close(Nack.of(0, log_recovered()))
        elif answers.is_open:
            self.check_token()
            self.deliveries.send_progress(now)
            if now - answers.writer.written_at >= self._context.settings.heartbeat_interval_s:
                self._heartbeats.send(now)

    def check_token(self) -> None:
        """End the connection if its token is no longer valid."""
        permissions, answers = self.client.permissions, self._answers
        if (
            permissions is not None
            and not answers.writer.is_ending
            and not self._context.access.is_valid(permissions)
        ):
            refused = Unauthorized("the token has expired or was revoked")
            answers.refuse_unauthorized(refused, "CONNECTION")

    def _timeout_reason(self, now: float) -> str | None:
        settings, reader = self._context.settings, self._reader
        if self.client.permissions is None:
            timed_out = now - self.started_at > settings.handshake_timeout_s
            return f"no hello within {settings.handshake_timeout_s} s" if timed_out else None
        if reader.is_waiting:
            return None
        if reader.frame_started_at is None:
            is_silent = now - reader.received_at > settings.peer_timeout_s
            return f"no frame for {settings.peer_timeout_s} s" if is_silent else None
        receiving_s, rate_min = now - reader.frame_started_at, settings.receive_rate_min
        if receiving_s <= settings.peer_timeout_s or self.connection.buffered_bytes >= receiving_s * rate_min:
            return None
        return f"a frame arrived at less than {rate_min} bytes per second for {receiving_s:.0f} s"

    # --- for the writer

    def take_answers(self) -> Sequence[Frame]:
        """Return the outcomes of received deltas that were not reported yet."""
        producer = self.dispatcher.produce_handler
        if producer is None or not producer.outcomes.has_answers or self.connection.phase is Phase.ENDED:
            return ()
        outcomes = producer.outcomes
        answers = outcomes.take_answers(
            throttled=producer.is_throttled and self._context.served.pressure.level is PressureLevel.STOP
        )
        if outcomes.is_unauthorized:
            self._writer.is_ending = True
        return answers

    def is_idle(self) -> bool:
        """Return True if nothing is to be written or ended before the next `notify` of the writer.

        Called after a complete write, since it is faster than asking for frames again.
        """
        end, deliveries = self._end, self.deliveries
        if end.is_draining or end.is_finishing or deliveries.pending_unsubscribes:
            return False
        producer, session = self.dispatcher.produce_handler, deliveries.session
        return (producer is None or not producer.outcomes.has_answers) and (
            session is None or session.try_idle()
        )

    def is_finished(self) -> bool:
        """Return True if no more frames will come. Called when there is nothing to write."""
        end, dispatcher = self._end, self.dispatcher
        if dispatcher.pending_answers or dispatcher.queries.pending or dispatcher.has_pending_outcomes:
            return False
        if end.is_draining and not end.is_finishing:
            if self.deliveries.has_delivered(end.log_end):
                self.close(Nack.of(0, server_closing()))  # written before the end
            return False
        return end.is_finishing

    # --- for the service

    def send_pressure(self, pressure: Backpressure) -> None:
        """Send backpressure advice to a producer."""
        producer = self.dispatcher.produce_handler
        if producer is not None and producer.is_used and self._answers.is_open:
            self._answers.send(pressure)

    def update_quota(self) -> None:
        """Follow changed quotas."""
        self.dispatcher.update_quota()

    def statistics(self) -> dict[str, Any]:
        """Return a snapshot, for people and their tools."""
        client, producer, session = self.client, self.dispatcher.produce_handler, self.deliveries.session
        return {
            "number": client.number,
            "address": client.address,
            "client": client.name,
            "token": None if client.permissions is None else client.permissions.name,
            "stream": self._context.served.stream,
            "partition": self.partition_name.partition,
            "seconds": round(self._context.clock.now() - self.started_at, 1),
            "pending_frames": 0 if producer is None else len(producer.outcomes.pending),
            "held": self.dispatcher.is_held,
            "subscribed": session is not None,
            **(NO_SUBSCRIPTION if session is None else session.statistics()),
        }
