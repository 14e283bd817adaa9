"""The periodic checks of one connection: its timeouts and its token; and what is sent when it is due."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from delta_prop.server.close_reasons import log_recovered, silence_reason, slowness_reason
from delta_prop.server.permissions import Unauthorized
from delta_prop_wire.frames import Nack

if TYPE_CHECKING:
    from delta_prop.server.answers import Answers
    from delta_prop.server.connected_client import ConnectedClient
    from delta_prop.server.connection_reader import ConnectionReader
    from delta_prop.server.consume_handler import ConsumeHandler
    from delta_prop.server.frame_dispatcher import FrameDispatcher
    from delta_prop.server.heartbeats import Heartbeats
    from delta_prop.server.server_context import ServerContext
    from delta_prop_wire.connection import Connection

logger = logging.getLogger("delta_prop.server")


class ConnectionChecks:
    """The checks of one connection. `started_at`: when it was accepted."""

    def __init__(
        self,
        context: ServerContext,
        client: ConnectedClient,
        connection: Connection,
        *,
        answers: Answers,
        reader: ConnectionReader,
        dispatcher: FrameDispatcher,
        deliveries: ConsumeHandler,
        heartbeats: Heartbeats,
    ) -> None:
        self.started_at = context.clock.now()
        self._context = context
        self._client = client
        self._connection = connection
        self._answers = answers
        self._reader = reader
        self._dispatcher = dispatcher
        self._deliveries = deliveries
        self._heartbeats = heartbeats

    def run(self, now: float, stalled_s: float) -> None:
        """Check timeouts and the token; send what is due. `stalled_s`: how long this server was stalled."""
        answers, client = self._answers, self._client
        if answers.writer.is_ending:
            return
        self._reader.received_at += stalled_s
        timeout_reason = self._timeout_reason(now)
        producer = self._dispatcher.produce_handler
        if timeout_reason is not None:
            logger.info("connection %d of %s ends: %s", client.number, client.address, timeout_reason)
            self._context.counters.connections_timed_out += 1
            answers.abort()
        elif producer is not None and producer.is_forwarder and self._dispatcher.is_outdated:
            # The forwarder reconnects and resends lost rows, even if it has no new ones for long.
            answers.close(Nack.of(0, log_recovered()))
        elif answers.is_open:
            self.check_token()
            self._deliveries.send_progress(now)
            if now - answers.writer.written_at >= self._context.settings.heartbeat_interval_s:
                self._heartbeats.send(now)

    def check_token(self) -> None:
        """End the connection if its token is no longer valid."""
        permissions, answers = self._client.permissions, self._answers
        if (
            permissions is not None
            and not answers.writer.is_ending
            and not self._context.access.is_valid(permissions)
        ):
            refused = Unauthorized("the token has expired or was revoked")
            answers.refuse_unauthorized(refused, "CONNECTION")

    def _timeout_reason(self, now: float) -> str | None:
        settings, reader = self._context.settings, self._reader
        if self._client.permissions is None:
            timed_out = now - self.started_at > settings.handshake_timeout_s
            return f"no hello within {settings.handshake_timeout_s} s" if timed_out else None
        if reader.waits_for_budget:
            return None
        if reader.frame_started_at is None:
            return silence_reason(now - reader.received_at, settings)
        buffered_bytes = self._connection.buffered_bytes
        return slowness_reason(now - reader.frame_started_at, buffered_bytes, settings)
